"""Interception: replaces, while a walk runs, the functions of torch through which it sees what a mode cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch import apis, eager_transforms
from torch.utils import checkpoint

CHECKPOINT = "<checkpoint>"
"""Path of a checkpointed region, which is followed like a module call."""


class Watcher(Protocol):
    """What a walk offers to the functions that are replaced."""

    @property
    def asleep(self) -> bool:
        """Whether calls go on unseen."""

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


def uncompiled(original: Any, module: nn.Module) -> Callable[..., Any]:
    """Give a module's call without torch.compile: compiled code cannot be followed, nor run on absent tensors."""
    inner = getattr(module, "_orig_mod", None)
    if inner is not None:  # torch.compile(module)
        return lambda _, *args, **kwargs: inner(*args, **kwargs)
    if getattr(module, "_compiled_call_impl", None) is not None:  # module.compile()
        return type(module)._call_impl
    return original


def intercept(walk: Watcher) -> Callable[[], None]:
    """Replace the functions by ones that ask `walk`; the result puts them back."""
    places: list[tuple[Any, str, Any]] = [
        (nn.Module, "__call__", _module_call(walk, nn.Module.__call__)),
        (torch.autograd.Function, "apply", _apply(walk, torch.autograd.Function.__dict__["apply"])),
        (checkpoint, "_checkpoint_without_reentrant_generator", _generator(walk)),
        # inside a transform of torch.func tensors are wrapped, so a transformed call is one event
        (apis, "vmap_impl", _opaque(walk, apis.vmap_impl)),
        (eager_transforms, "grad_impl", _opaque(walk, eager_transforms.grad_impl)),
        (eager_transforms, "grad_and_value_impl", _opaque(walk, eager_transforms.grad_and_value_impl)),
    ]
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in places]
    for owner, name, replacement in places:
        setattr(owner, name, replacement)

    def put_back() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    return put_back


def _module_call(walk: Watcher, original: Any) -> Any:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if walk.asleep:
            return original(module, *args, **kwargs)
        return walk.module_call(original, module, args, kwargs)

    return call


def _apply(walk: Watcher, original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        function = original.__get__(None, cls)
        if walk.asleep:
            return function(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            return walk.reentrant_call(function, args)
        return walk.opaque_call(function, args, kwargs)

    return classmethod(apply)


def _generator(walk: Watcher) -> Any:
    original = checkpoint._checkpoint_without_reentrant_generator

    def generator(run: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if walk.asleep:
            yield from original(run, *args, **kwargs)
            return
        with walk.region() as position:
            yield from original(walk.again(position, run), *args, **kwargs)

    return generator


def _opaque(walk: Watcher, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if walk.asleep:
            return original(*args, **kwargs)
        return walk.opaque_call(original, args, kwargs)

    return call
