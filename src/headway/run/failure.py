"""Failure: adds to an error of the user's code where it happened: stage, micro-batch, module."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn

from headway.errors import HeadwayError
from headway.run.stage import Stage


class InPlace:
    """Notes on any error that leaves the block where it happened; the error itself stays the user's own."""

    __slots__ = ("micro", "stage", "what")

    def __init__(self, stage: Stage, micro: int, what: str = "forward") -> None:
        self.stage, self.micro, self.what = stage, micro, what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Add the note."""
        if not isinstance(error, Exception) or isinstance(error, HeadwayError):
            return
        parts = [f"{self.what} of micro-batch {self.micro}"]
        if self.stage.split.num_stages > 1:
            parts.insert(0, f"stage {self.stage.index} of {self.stage.split.num_stages}")
        module = module_of(trace, self.stage.model)
        if module:
            parts.append(f"module {module}")
        error.add_note(", ".join(parts))


def module_of(trace: TracebackType | None, model: nn.Module) -> str | None:
    """Name the innermost module of the model that was running when an error was raised; None when none was."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if id(owner) in names:
            found = names[id(owner)] or type(owner).__name__
        trace = trace.tb_next
    return found
