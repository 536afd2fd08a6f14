"""Failure: adds to an error of the user's code where it happened: stage, micro-batch, module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from headway.errors import HeadwayError
from headway.run.stage import Stage


@contextmanager
def in_place(stage: Stage, micro: int, what: str = "forward") -> Iterator[None]:
    """Note on any error that leaves the block where it happened; the error itself stays the user's own."""
    try:
        yield
    except HeadwayError:
        raise
    except Exception as error:
        parts = [f"{what} of micro-batch {micro}"]
        if stage.split.num_stages > 1:
            parts.insert(0, f"stage {stage.index} of {stage.split.num_stages}")
        module = module_of(error.__traceback__, stage.model)
        if module:
            parts.append(f"module {module}")
        error.add_note(", ".join(parts))
        raise


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
