"""Timeline: when each rank did what, and the bytes it held; the same value for what is planned and what happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from headway.schedule.action import COMPUTES, Action, Kind


class Span(NamedTuple):
    """One action of one rank, from `start` to `end` (seconds).

    The span of a SEND is its way over the link, beside the rank's other work; that of a RECV is the rank's wait.
    A named tuple: a step may have a million of them.
    """

    rank: int
    action: Action
    start: float
    end: float


Steps = tuple[tuple[float, int], ...]
"""Bytes over time: (seconds, bytes from then on), in order of time."""


@dataclass(frozen=True)
class Timeline:
    """What each rank does when, from second 0, and `memory[rank]`, the bytes that it holds over time (or empty)."""

    num_ranks: int
    spans: tuple[Span, ...]
    memory: tuple[Steps, ...] = ()

    @cached_property
    def makespan(self) -> float:
        """Give the seconds from 0 to the end of the last action."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        total = [0.0] * self.num_ranks
        for span in self.spans:
            if span.action.kind in COMPUTES or span.action.kind is Kind.REDUCE:
                total[span.rank] += span.end - span.start
        return tuple(total)

    def busy(self, rank: int) -> float:
        """Give the seconds in which a rank computes or reduces."""
        return self._busy[rank]

    @property
    def bubble(self) -> float:
        """Give the share of the step, over all ranks, in which a rank has nothing to do: 0 is perfect."""
        whole = self.num_ranks * self.makespan
        return 1 - sum(self._busy) / whole if whole > 0 else 0.0

    def peak_bytes(self, rank: int) -> int:
        """Give the most bytes that a rank holds at once; 0 when memory is not known."""
        return max((size for _, size in self.memory[rank]), default=0) if self.memory else 0

    def of(self, rank: int) -> tuple[Span, ...]:
        """Give the spans of one rank, by start."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> tuple[tuple[Span, ...], ...]:
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(tuple(sorted(row, key=lambda span: (span.start, span.end))) for row in rows)


def recorded(
    spans: Iterable[tuple[int, Action, float, float]],
    *,
    num_ranks: int | None = None,
    memory: Iterable[Iterable[tuple[float, int]]] = (),
) -> Timeline:
    """Build the Timeline of what happened from (rank, action, start, end) of several ranks, in any order.

    Times are seconds on one common clock; they are shifted so that the first action starts at 0, and `memory`, (time,
    bytes) for each rank on the same clock, with them. `num_ranks` counts ranks that recorded nothing too.
    Raises ValueError when a span ends before it starts, or its rank or the memory's is not below `num_ranks`.
    """
    rows = sorted(((start, end, rank, action) for rank, action, start, end in spans), key=lambda row: row[:3])
    steps = [sorted(row) for row in memory]
    count = max((rank + 1 for _, _, rank, _ in rows), default=0) if num_ranks is None else num_ranks
    for start, end, rank, action in rows:
        if not start <= end:
            raise ValueError(f"{action} on rank {rank} ends at {end}, before it starts at {start}")
        if not 0 <= rank < count:
            raise ValueError(f"{action} is on rank {rank}; there are {count} ranks")
    if steps and len(steps) != count:
        raise ValueError(f"memory of {len(steps)} ranks for {count} ranks")
    zero = rows[0][0] if rows else 0.0
    return Timeline(
        num_ranks=count,
        spans=tuple(Span(rank, action, start - zero, end - zero) for start, end, rank, action in rows),
        memory=tuple(tuple((max(time - zero, 0.0), size) for time, size in row) for row in steps),
    )
