"""Interception: replaces, while a walk runs, the functions of torch through which it sees what a mode cannot."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch import apis, eager_transforms
from torch.autograd.function import _SingleLevelFunction
from torch.nn.utils import clip_grad
from torch.utils import checkpoint
from torch.utils.hooks import BackwardHook

from headway.graph.backward import names_of, refuse_backward, refuse_number, refuse_scale

CHECKPOINT = "<checkpoint>"
"""Path of a checkpointed region, which is followed like a module call."""

GENERATOR = "_checkpoint_without_reentrant_generator"
"""The one function that every checkpoint of the other kind passes, whoever imported what by which name."""

ENGINE = "_engine_run_backward"
"""What each backward and each torch.autograd.grad ends in, by whatever name it is called."""

NORM = "_get_total_norm"
"""What clip_grad_norm_ takes the norm with, by whatever name it is called."""

COMPILING = "_callback_from_stance"
"""What everything that torch.compile made asks, each time, whether to compile; torch.compiler.set_stance acts there."""


class Watcher(Protocol):
    """What a walk offers to the functions that are replaced."""

    paused: bool  # calls go on unseen

    def goes_back(self, roots: Any, inputs: Any) -> None:
        """Look at a backward that the program calls: from which tensors, and to which alone if any."""

    def module_call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a module's call."""

    def opaque_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a call whose inside is not followed."""

    def reentrant_call(self, apply: Any, args: Any) -> Any:
        """Carry out a checkpointed region of the re-entrant kind."""

    def region(self) -> Any:
        """Surround a checkpointed region."""

    def again(self, position: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Give what computes a checkpointed region again."""

    def backward_hook(self, original: Any, hook: BackwardHook, args: Any) -> Any:
        """Carry out what a module with full backward hooks does to its arguments, or to its result."""


def uncompiled(original: Any, module: nn.Module) -> Callable[..., Any]:
    """Give a module's call without torch.compile: compiled code cannot be followed, nor run on absent tensors."""
    inner = getattr(module, "_orig_mod", None)
    if inner is not None:  # torch.compile(module)
        return lambda _, *args, **kwargs: inner(*args, **kwargs)
    if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile()
        return type(module)._call_impl
    return original


class _Now(threading.local):
    walk: Watcher | None = None
    model: nn.Module | None = None  # whose loss runs without a walk


class Interception:
    """The replaced functions: in place while anybody holds them, and asking the walk of their own thread if any.

    To replace nn.Module.__call__ costs 0.3 ms, and more in the calls after it, since each subclass forgets what it
    knew; so a stage holds it for as long as it lives, not for each pass.
    """

    def __init__(self) -> None:
        self.now = _Now()
        self.holders = 0
        self.originals: list[tuple[Any, str, Any]] = []
        self.norms: list[Callable[[Sequence[torch.Tensor]], None]] = []  # asked before torch takes one to clip by

    def hold(self) -> None:
        """Replace the functions, if they are not yet."""
        self.holders += 1
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # else nothing is compiled; to import it takes seconds
        if dynamo is not None and all(owner is not dynamo for owner, _, _ in self.originals):
            self._replace(dynamo, COMPILING, self._compiling(getattr(dynamo, COMPILING)))
        if self.holders > 1:
            return
        places = [
            (nn.Module, "__call__", self._module_call(nn.Module.__call__)),
            # what Function.apply calls: that one itself may have been given another name before (f = MyFunction.apply)
            (_SingleLevelFunction, "apply", self._apply()),
            (torch.jit.ScriptFunction, "__call__", self._scripted(torch.jit.ScriptFunction.__call__)),
            (checkpoint, GENERATOR, self._generator(getattr(checkpoint, GENERATOR))),
            # inside a transform of torch.func tensors are wrapped, so a transformed call is one event
            (apis, "vmap_impl", self._opaque(apis.vmap_impl)),
            (eager_transforms, "grad_impl", self._opaque(eager_transforms.grad_impl)),
            (eager_transforms, "grad_and_value_impl", self._opaque(eager_transforms.grad_and_value_impl)),
            (eager_transforms, "_jvp_with_argnums", self._opaque(eager_transforms._jvp_with_argnums)),
            (eager_transforms, "_vjp_with_argnums", self._opaque(eager_transforms._vjp_with_argnums)),
            (BackwardHook, "setup_input_hook", self._backward_hook(BackwardHook.setup_input_hook)),
            (BackwardHook, "setup_output_hook", self._backward_hook(BackwardHook.setup_output_hook)),
            (torch.autograd, ENGINE, self._engine(getattr(torch.autograd, ENGINE))),
            (clip_grad, NORM, self._norm(getattr(clip_grad, NORM))),
            (torch.amp.GradScaler, "scale", self._scale(torch.amp.GradScaler.scale)),
        ]
        for owner, name, replacement in places:
            self._replace(owner, name, replacement)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self.originals.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, replacement)

    def release(self) -> None:
        """Put the originals back, if nobody else holds the functions."""
        self.holders -= 1
        if not self.holders:
            for owner, name, original in self.originals:
                if original is None:
                    delattr(owner, name)  # it was inherited
                else:
                    setattr(owner, name, original)
            self.originals.clear()

    def follow(self, walk: Watcher | None) -> Watcher | None:
        """Make `walk` the one that is asked in this thread; gives the one before."""
        before, self.now.walk = self.now.walk, walk
        return before

    @contextmanager
    def loss_of(self, model: nn.Module) -> Iterator[None]:
        """Say that the loss function of `model` runs in the block, in this thread, without a walk."""
        before, self.now.model = self.now.model, model
        try:
            yield
        finally:
            self.now.model = before

    def _engine(self, original: Any) -> Any:
        now = self.now

        def run(roots: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("accumulate_grad"):
                pass  # torch.autograd.grad
            elif now.walk is not None:
                now.walk.goes_back(roots, inputs)
            elif now.model is not None:
                refuse_backward(roots, inputs, names_of(now.model))
            elif not any(getattr(root, "requires_grad", True) for root in roots):
                refuse_number()
            return original(roots, gradients, keep, create, inputs, *args, **kwargs)

        return run

    def _norm(self, original: Any) -> Any:
        def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            for look in self.norms:
                look(tensors)
            return original(tensors, *args, **kwargs)

        return norm

    def _scale(self, original: Any) -> Any:
        now = self.now

        def scale(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled() and not (now.walk is None and now.model is None):
                refuse_scale()
            return original(scaler, outputs)

        return scale

    def _module_call(self, original: Any) -> Any:
        now = self.now

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            walk = now.walk
            if walk is None or walk.paused:
                return original(module, *args, **kwargs)
            return walk.module_call(original, module, args, kwargs)

        return call

    def _apply(self) -> Any:
        now = self.now

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            function, walk = super(_SingleLevelFunction, cls).apply, now.walk  # type: ignore[misc]
            if walk is None or walk.paused:
                return function(*args, **kwargs)
            if cls is checkpoint.CheckpointFunction:
                return walk.reentrant_call(function, args)
            return walk.opaque_call(function, args, kwargs)

        return classmethod(apply)

    def _scripted(self, original: Any) -> Any:
        now = self.now

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            walk = now.walk
            if walk is None or walk.paused:
                return original(function, *args, **kwargs)
            return walk.opaque_call(functools.partial(original, function), args, kwargs)

        return call

    def _generator(self, original: Any) -> Any:
        now = self.now

        def generator(run: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            walk = now.walk
            if walk is None or walk.paused:
                yield from original(run, *args, **kwargs)
                return
            with walk.region() as position:
                yield from original(walk.again(position, run), *args, **kwargs)

        return generator

    def _backward_hook(self, original: Any) -> Any:
        now = self.now

        def setup(hook: BackwardHook, args: Any) -> Any:
            walk = now.walk
            if walk is None or walk.paused:
                return original(hook, args)
            return walk.backward_hook(original, hook, args)

        return setup

    def _compiling(self, original: Any) -> Any:
        now = self.now

        def callback(compiler: Any) -> Any:
            walk = now.walk
            return original(compiler) if walk is None or walk.paused else None  # None: as it is written

        return callback

    def _opaque(self, original: Any) -> Any:
        now = self.now

        def call(*args: Any, **kwargs: Any) -> Any:
            walk = now.walk
            if walk is None or walk.paused:
                return original(*args, **kwargs)
            return walk.opaque_call(original, args, kwargs)

        return call


INTERCEPTION = Interception()
