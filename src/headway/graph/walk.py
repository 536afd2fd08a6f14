"""Walk: follows loss(model, batch) while it runs, event by event, and names each torch call by its position."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import BackwardHook

from headway.graph.backward import names_of, refuse_backward
from headway.graph.frame import Calls, Frame, Landmarks, call_key
from headway.graph.interception import CHECKPOINT, INTERCEPTION, Watcher, uncompiled
from headway.graph.keras import layer_paths
from headway.graph.model import Position
from headway.graph.pause import Pause

TENSOR_GETTERS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})
"""Attributes of a tensor that make another tensor, and so count as calls."""

PLAIN_METHODS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "size dim ndimension numel nelement stride is_floating_point is_contiguous is_complex is_signed element_size "
        "storage_offset get_device data_ptr untyped_storage __len__ __hash__ __repr__ __format__ has_names "
        "is_inference is_same_size is_set_to is_conj is_neg is_pinned is_shared type_as register_hook "
        "register_post_accumulate_grad_hook retain_grad backward __reduce_ex__"
    ).split()
    if name != "type_as" and hasattr(torch.Tensor, name)
)
"""Methods that ask for facts other than content: never a call of the program."""

VALUE_READS = frozenset(
    "item tolist __bool__ __int__ __float__ __index__ __complex__ is_nonzero numpy __array__ __contains__ equal "
    "allclose".split()
)
"""Functions whose Python result depends on a tensor's content."""

SHAPE_READS = frozenset("nonzero argwhere masked_select unique unique_consecutive bincount _unique2".split())
"""Functions whose result has a shape that depends on a tensor's content."""


def function_name(func: Any) -> str:
    """Name a torch function by its attribute path, for instance "torch.nn.functional.linear"."""
    return "torch.jit.ScriptModule.__call__" if isinstance(func, functools.partial) else _function_name(func)


@functools.lru_cache(maxsize=4096)
def _function_name(func: Any) -> str:
    try:
        name = resolve_name(func)
    except Exception:  # resolve_name looks attributes up on whatever it is given
        name = None
    if name:
        return str(name)
    owner = getattr(func, "__module__", None) or "torch"
    return f"{owner}.{getattr(func, '__qualname__', getattr(func, '__name__', repr(func)))}"


def short_name(func: Any) -> str:
    """Name a torch function without its path: "linear", "__getitem__"."""
    return str(getattr(func, "__name__", "")) or function_name(func).rsplit(".", 1)[-1]


def is_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call's result is a Python value that depends on content."""
    return short_name(func) in VALUE_READS


def is_shape_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call's result has a shape that depends on content."""
    name = short_name(func)
    if name in SHAPE_READS:
        return True
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
        return "output_size" not in kwargs and (
            isinstance(repeats, torch.Tensor) and repeats.dim() > 0 or (repeats is None and len(args) == 1)
        )
    if name == "__getitem__" and len(args) == 2:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) and i.dim() > 0 for i in index)
    return False


def is_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Say whether a call, by its name, changes a tensor that it is given."""
    name = short_name(func)
    named = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return named or "out" in kwargs


def tensors_of(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Collect the tensors of nested tuples, lists, dicts and slices, in order."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            tensors_of(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            tensors_of(item, found)
    elif isinstance(value, slice):
        tensors_of((value.start, value.stop, value.step), found)
    return found


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Collect the tensors of a batch or of what a program returned: also of dataclasses (`headway.Mean`) and UserDicts.

    UserDicts are what tokenizers and collators of transformers give (`BatchEncoding`).
    """
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, UserDict):
            found += all_tensors(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += all_tensors([getattr(leaf, item.name) for item in fields(leaf)])
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Rebuild nested tuples, lists, dicts and slices with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        # named tuples (torch.return_types included) are built from one sequence or from fields
        if type(value) is tuple:
            return tuple(items)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_tensors(part, change) for part in (value.start, value.stop, value.step)))
    return value


def module_paths(model: nn.Module) -> dict[int, str]:
    """Give the path of each module by its id; of Keras models also those of layers, which are no submodules."""
    paths = {id(module): name for name, module in model.named_modules()}
    for name, layer in layer_paths(model):
        paths.setdefault(id(layer), name)
    return paths


class Walk(TorchFunctionMode):
    """Sees each torch call and each module call of the block it surrounds, in program order.

    A subclass says what happens at a call (`on_call`), at a call whose inside is not followed (`on_opaque`), and at a
    module's call (`on_module`). Facts about a tensor that are not its content (shape, dtype) pass through and have no
    position; `fact` may change the answer. In a frame of `landmarks` and `recorded`, events are found again whatever
    else the frame does this time (`headway.graph.frame`); elsewhere they are numbered as they come. `weights` names
    the parameters, by id.
    While the block runs, the functions of `interception` are replaced, in effect for this thread alone, as torch.fx
    replaces `nn.Module.__call__`.
    """

    def __init__(
        self, paths: dict[int, str], landmarks: Landmarks | None = None, recorded: Calls | None = None,
        weights: Mapping[int, str] | None = None, model: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.paths, self.model = paths, model  # of modules, by id
        self.landmarks, self.recorded, self.weights = landmarks or {}, recorded or {}, weights or {}
        self.frames = [self.frame((), "", ())]
        self.paused = False
        self.opaque = False  # the call under way has an inside of its own
        self.outer: Watcher | None = None

    # what a subclass decides

    def on_call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one torch call; its own torch calls are not seen."""
        return func(*args, **kwargs)

    def on_opaque(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call that may use tensors other than its arguments: a custom function, a scripted module."""
        return self.on_call(position, func, args, kwargs)

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Carry out one module call; `run()` runs the module's own Python under this walk."""
        return run()

    def on_region(self, position: Position) -> None:
        """Note that a checkpointed region begins; its events lie at positions that begin with this one."""

    def on_reentrant(self, position: Position, apply: Callable[..., Any], run: Any, preserve: Any, args: Any) -> Any:
        """Carry out a checkpointed region of the re-entrant kind; `apply(run, preserve, *args)` is what torch does."""
        return apply(run, preserve, *args)

    def again(self, position: Position, run: Callable[..., Any]) -> Callable[..., Any]:
        """Give what computes a checkpointed region again in backward."""
        return run

    def backward_hook(self, original: Any, hook: BackwardHook, args: Any) -> Any:
        """Carry out what a module with full backward hooks does to its arguments, or to its result."""
        return original(hook, args)

    def goes_back(self, roots: Any, inputs: Any) -> None:
        """Refuse a backward that the program calls, if it reaches parameters."""
        refuse_backward(roots, inputs, {} if self.model is None else names_of(self.model))

    def fact(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a question about a tensor that is not about its content."""
        return func(*args, **kwargs)

    # the machinery

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Route one torch call (torch's protocol for modes)."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name not in TENSOR_GETTERS:
                return self.fact(func, name, args, kwargs)
        elif name in ("__set__", "_set_grad_enabled") or func in PLAIN_METHODS:
            return self.fact(func, name, args, kwargs)
        elif name == "requires_grad_" and isinstance(args[0], nn.Parameter):  # whoever holds it freezes it
            return self.fact(func, name, args, kwargs)
        before, self.paused = self.paused, True  # what happens inside a call is part of it
        try:
            return self._event(self.on_call, func, args, kwargs)
        finally:
            self.paused = before

    def _event(self, handle: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = self.frames[-1]
        position = frame.next_event("" if frame.calls is None else self._key(func, args, kwargs))
        result = handle(position, func, args, kwargs)
        # a call is an event if it makes or changes tensors or reads content; is_tensor, broadcast_shapes are not
        if isinstance(result, torch.Tensor) or result is None or is_read(func, args, kwargs) or tensors_of(result, []):
            frame.happened(position)
        return result

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        tensors, weight = tensors_of((args, kwargs), []), ""
        for tensor in tensors:
            if id(tensor) in self.weights:
                weight = self.weights[id(tensor)]
                break
        return call_key(function_name(func), tensors[0].dim() if tensors else -1, weight)

    def frame(self, position: Position, path: str, begun: Position | None = None) -> Frame:
        """Begin a module call's frame, inside the one that is open unless `begun` says where."""
        if begun is None:
            outer = self.frames[-1]
            begun = (*outer.begun, outer.modules, 0)
        return Frame(position, path, self.landmarks.get(position), self.recorded.get(position), begun)

    def module_call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a call of nn.Module.__call__."""
        if isinstance(module, torch.jit.ScriptModule):
            return self.opaque_call(functools.partial(original, module), args, kwargs)
        path = self.paths.get(id(module)) or self.path_of(module)
        return self.module_at(self.frames[-1].next_module(path), path, original, module, args, kwargs)

    def path_of(self, module: nn.Module) -> str:
        """Give a module's path; its kind in brackets if it is not part of the model."""
        if id(module) not in self.paths and self.model is not None and any(True for _ in module.parameters()):
            self.paths.update(module_paths(self.model))  # the program may have put another in a module's place
        return self.paths.get(id(module), f"<{type(module).__name__}>")

    def module_at(self, position: Position, path: str, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a module call at its place."""

        def run() -> Any:
            if self.paused:
                return original(module, *args, **kwargs)
            depth = len(self.frames)
            self.frames.append(self.frame(position, path))
            try:
                return uncompiled(original, module)(module, *args, **kwargs)
            finally:
                del self.frames[depth:]

        return self.on_module(position, module, run, args, kwargs)

    def opaque_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a call as one event, whatever happens inside."""
        with self.pause():
            self.opaque = True
            try:
                return self._event(self.on_opaque, func, args, kwargs)
            finally:
                self.opaque = False

    def reentrant_call(self, apply: Any, args: Any) -> Any:
        """Carry out torch.utils.checkpoint's re-entrant function: its inside is followed."""
        with self.region() as position:
            return self.on_reentrant(position, apply, args[0], args[1], args[2:])

    @contextmanager
    def region(self) -> Iterator[Position]:
        """Give the events inside the block a frame of their own."""
        path = self.frames[-1].path
        position = self.frames[-1].next_module(CHECKPOINT)
        self.on_region(position)
        depth = len(self.frames)
        self.frames.append(self.frame(position, path))
        try:
            yield position
        finally:
            del self.frames[depth:]

    def pause(self) -> Pause:
        """Let torch run at full speed, unseen, inside the block."""
        return Pause(self)

    @property
    def module_path(self) -> str:
        """Path of the module whose forward is running now; "" in the loss function."""
        return self.frames[-1].path

    def __enter__(self) -> Walk:
        """Begin to see calls."""
        INTERCEPTION.hold()
        self.outer = INTERCEPTION.follow(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Leave torch as it was."""
        super().__exit__(*exception)
        INTERCEPTION.follow(self.outer)
        INTERCEPTION.release()
