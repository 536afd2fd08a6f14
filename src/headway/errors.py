"""Every refusal a person can meet: the fact, the place, the remedy, in that order."""

from __future__ import annotations

from typing import Any


class HeadwayError(Exception):
    """Say what is wrong (`fact`), where (`place`) and what to do about it (`remedy`)."""

    def __init__(self, fact: str, *, place: str | None = None, remedy: str | None = None) -> None:
        super().__init__(fact, place, remedy)
        self.fact = fact
        self.place = place
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes as what it says (exceptions are pickled by their positional arguments)."""
        return _rebuild, (type(self), self.fact, self.place, self.remedy)

    def __str__(self) -> str:
        lines = [self.fact]
        if self.place:
            lines.append(f"  {self.place}")
        if self.remedy:
            lines.append(f"  Try: {self.remedy}")
        return "\n".join(lines)


def _rebuild(kind: type[HeadwayError], fact: str, place: str | None, remedy: str | None) -> HeadwayError:
    return kind(fact, place=place, remedy=remedy)


class PlanError(HeadwayError):
    """No plan satisfies what was asked, or a plan does not belong to this model, batch or machine."""


class SplitError(HeadwayError):
    """The model cannot be cut where the plan cuts it, or a stage met a value that it does not have."""


class BatchError(HeadwayError):
    """A batch cannot be shared out: its leaves disagree, or it differs from what was planned."""


class RankError(HeadwayError):
    """A rank failed, or did not answer within the deadline."""


class CheckpointError(HeadwayError):
    """A checkpoint is missing, damaged, or belongs to another model."""
