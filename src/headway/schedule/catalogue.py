"""Catalogue: the schedules for training by the names that plans and `fixed={"schedule": ...}` use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headway.errors import PlanError
from headway.schedule.action import Schedule
from headway.schedule.build import gpipe, one_f_one_b
from headway.schedule.chunks import breadth_first, interleaved
from headway.schedule.dual_pipe import dual_pipe_v
from headway.schedule.greedy import backward_first
from headway.schedule.zero_bubble import zero_bubble, zero_bubble_v


@dataclass(frozen=True)
class Entry:
    """One schedule: how it is built, how many stages (chunks) a rank may hold under it, whether backward is split.

    `build(num_stages, num_micro, chunks)` returns it. `most` is None where any number of chunks will do.
    """

    build: Callable[[int, int, int], Schedule]
    least: int = 1
    most: int | None = 1
    split: bool = False

    def allows(self, chunks: int) -> bool:
        """Tell whether a rank may hold so many stages."""
        return self.least <= chunks and (self.most is None or chunks <= self.most)


def zero_bubble_h2(num_stages: int, num_micro: int) -> Schedule:
    """Return ZB-H2: `zero_bubble` two micro-batches ahead for each stage that follows."""
    return replace(zero_bubble(num_stages, num_micro, ahead=2), name="zero_bubble_h2")


def _alone(build: Callable[[int, int], Schedule], *, split: bool = False) -> Entry:
    return Entry(lambda stages, micro, chunks: build(stages, micro), split=split)


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        "gpipe": _alone(gpipe),
        "one_f_one_b": _alone(one_f_one_b),
        "backward_first": _alone(backward_first),
        "zero_bubble": _alone(zero_bubble, split=True),
        "zero_bubble_h2": _alone(zero_bubble_h2, split=True),
        "interleaved": Entry(lambda s, m, chunks: interleaved(s, m, chunks=chunks), 2, None),
        "breadth_first": Entry(lambda s, m, chunks: breadth_first(s, m, chunks=chunks), 2, None),
        "zero_bubble_v": Entry(lambda s, m, chunks: zero_bubble_v(s, m), 2, 2, split=True),
        "dual_pipe_v": Entry(lambda s, m, chunks: dual_pipe_v(s, m), 2, 2, split=True),
    }
)


def build(name: str, num_ranks: int, num_micro: int, chunks: int = 1) -> Schedule:
    """Return the schedule called `name` for pipeline ranks that hold `chunks` stages each.

    Raises PlanError for a name that is not in the catalogue, and for chunks that the schedule has no place for.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise PlanError(f"there is no schedule called {name!r}", remedy=f"one of {', '.join(CATALOGUE)}")
    if not entry.allows(chunks):
        raise PlanError(
            f"{name} has {chunks_text(entry)} on each rank, not {chunks}", place="chunks", remedy=_others(chunks)
        )
    return entry.build(num_ranks * chunks, num_micro, chunks)


def chunks_text(entry: Entry) -> str:
    """Write how many stages a rank holds: "1 stage", "2 stages", "2 stages or more"."""
    text = f"{entry.least} stage{'' if entry.least == 1 else 's'}"
    return text if entry.most == entry.least else f"{text} or more"


def _others(chunks: int) -> str:
    names = [name for name, entry in CATALOGUE.items() if entry.allows(chunks)]
    return f"chunks={chunks} goes with {', '.join(names)}"
