"""Surface: what a model under a plan answers as the nn.Module that it still is, and what it cannot do as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn

from headway.errors import HeadwayError
from headway.planner.explain import layout_text
from headway.planner.plan import Plan


class Surface(nn.Module):
    """The nn.Module's side of a ParallelModel: names are those of `module`, parameters those of this rank (`_held`)."""

    module: nn.Module
    plan: Plan
    _held: Mapping[str, nn.Parameter]
    _nothing: nn.Parameter

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation (dropout, batch norm), as for any module."""
        self.training = mode
        self.module.train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the model's own names; with a plan's `shard`, those that it updates."""
        for name, parameter in self._held.items():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters; an empty one where a stage has none, which optimizers refuse."""
        yield from self._held.values() or (self._nothing,)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's buffers; those that the program changes are right on the stage that changes them."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Yield the model's own modules, all of them on every rank; parameters of other ranks are on meta."""
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's own children."""
        return self.module.named_children()

    def apply(self, fn: Callable[[nn.Module], Any]) -> NoReturn:
        """Refuse: copies would draw other numbers, and stages have not all that `fn` may look at."""
        raise HeadwayError(
            "a function cannot be applied to a model that is under a plan: each rank would do it to what it holds",
            place="model.apply(...)",
            remedy="call it before headway.plan; for what changes no weights, loop over model.modules()",
        )

    def extra_repr(self) -> str:
        """Say under which plan, and how much of the model this rank holds."""
        total = sum(1 for _ in self.module.parameters())
        return f"{layout_text(self.plan)}; {len(self._held)} of {total} parameters here\n(module): {self.module!r}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse another dtype or device (`to`, `half`, `cuda`, ...), which come down to this; else do nothing."""
        here = next(self.parameters()).detach()
        there = fn(here)
        if (there.dtype, there.device) == (here.dtype, here.device):
            return self
        raise HeadwayError(
            f"the plan is for {here.dtype} on {here.device}, not {there.dtype} on {there.device}",
            place="model.to(...), .half(), .cuda() and the like",
            remedy="cast the model before headway.plan; headway.parallelize moves it to this rank's device",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise HeadwayError(
            "a model under a plan cannot be copied: it talks with other ranks",
            place="copy.deepcopy(model), as swa_utils.AveragedModel does too",
            remedy="keep {name: p.detach().clone() for name, p in model.named_parameters()} on each rank; "
            "model.state_dict() is the whole model",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self.__dict__ or not hasattr(self.module, name):
                raise
        raise AttributeError(
            f"a ParallelModel has no attribute {name!r}; the model it was made of has: model.module.{name}. "
            "What it does with parameters it does on this rank alone, and those of other stages are not there"
        )
