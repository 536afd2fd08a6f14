"""Hooks: what becomes of hooks on gradients before a stage's start, where tensors are absent and have no gradients."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.hooks import BackwardHook, RemovableHandle

GRADIENT_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Methods of a tensor that ask to be told of its gradient."""


def no_hook() -> RemovableHandle:
    """Give the handle of a hook that is left to the stage that makes the tensor."""
    return RemovableHandle(OrderedDict())


def leave_out(hook: BackwardHook, args: Any) -> Any:
    """Do to a module's arguments, or to its result, what full backward hooks do, but for the hooks themselves.

    The aliases that torch makes are events of the program, so they are made; `args` is what BackwardHook gets.
    """
    given = args if isinstance(args, tuple) else (args,)
    hook.n_inputs = len(given)
    tensors = [item for item in given if isinstance(item, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return args
    hook.input_tensors_index = []  # type: ignore[assignment]  # torch says None, and puts a list
    fresh = iter(BackwardHookFunction.apply(*tensors))
    made = [next(fresh) if isinstance(item, torch.Tensor) else item for item in given]
    if args is not given:
        return made[0]
    return tuple(made) if type(args) is tuple else type(args)(*made)


def is_torn(hook: BackwardHook) -> bool:
    """Say whether a module's inputs were left out, so that a hook on its result would never have their gradients."""
    return hook.input_tensors_index == [] and bool(hook.user_hooks)
