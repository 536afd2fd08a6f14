"""Exchange: a schedule as text, one line a rank, in the compute-only form that torch.distributed.pipelining reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from headway.errors import PlanError
from headway.schedule.action import COMPUTES, Action, Kind, Schedule
from headway.schedule.check import check

_CELL = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
# What torch adds to some of its orders, and `lower` adds here; "0REDUCE_GRAD" or, written otherwise, "0REDUCE_GRAD3".
_REDUCE = re.compile(r"\d+REDUCE_GRAD\d*")
_MESSAGE = re.compile(r"\d+(SEND|RECV)_[FB]\d+|\d+(UNSHARD|RESHARD)\d*")


def write_rows(schedule: Schedule) -> tuple[str, ...]:
    """Write each rank's computations as one line: "0F0,0F1,0B0,0B1"; I and W are input and weight gradients.

    Messages and reductions are left out: they follow from the edges of the model.
    """
    return tuple(",".join(str(action) for action in actions if action.kind in COMPUTES) for actions in schedule.ranks)


def read_rows(rows: Sequence[str], *, name: str = "imported") -> Schedule:
    """Read one line for each rank; empty cells, which only pad, are skipped, and so are reductions.

    A stage belongs to the rank whose line it is in; what torch writes as overlapping, "(0F3;7B1)OVERLAP_F_B", is done
    one after the other. Raises PlanError, naming line and cell, for text that is no action, and whatever
    `headway.schedule.check` has to say of the schedule.
    """
    ranks = tuple(tuple(_actions(row, rank, name)) for rank, row in enumerate(rows))
    placement: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if placement.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"schedule {name!r}: stage {action.stage} is on rank {placement[action.stage]} and on rank {rank}",
                    place=f"{action} in line {rank + 1}",
                    remedy="a stage belongs to one rank",
                )
    for rank, actions in enumerate(ranks):
        if not actions:
            raise PlanError(f"schedule {name!r}: rank {rank} does nothing", place=f"line {rank + 1}")
    num_stages = 1 + max(placement, default=-1)
    lost = next((stage for stage in range(num_stages) if stage not in placement), None)
    if lost is not None:
        raise PlanError(f"schedule {name!r}: no rank does anything for stage {lost} of {num_stages}")
    num_micro = 1 + max((action.micro for actions in ranks for action in actions), default=-1)
    schedule = Schedule(name, num_stages, num_micro, ranks, tuple(placement[stage] for stage in range(num_stages)))
    check(schedule)
    return schedule


def write_csv(schedule: Schedule) -> str:
    """Write the whole schedule as text that torch's `_load_csv` reads."""
    return "".join(f"{row}\n" for row in write_rows(schedule))


def read_csv(text: str, *, name: str = "imported") -> Schedule:
    """Read text such as torch's `_dump_csv(..., "compute_only")` writes; raises as `read_rows` does."""
    return read_rows(text.rstrip().splitlines(), name=name)


def _actions(row: str, rank: int, name: str) -> Iterator[Action]:
    for column, cell in enumerate(row.split(",")):
        text = cell.strip()
        together = _TOGETHER.fullmatch(text)
        for part in together[1].split(";") if together else [text]:
            if not part.strip() or _REDUCE.fullmatch(part.strip()):
                continue
            found = _CELL.fullmatch(part.strip())
            if found is None:
                message = _MESSAGE.fullmatch(part.strip())
                raise PlanError(
                    f"schedule {name!r}: {part.strip()[:40]!r} is "
                    + ("a message: only computations are read" if message else "no action"),
                    place=f"line {rank + 1} (rank {rank}), cell {column + 1}",
                    remedy='write computations alone, as "0F3": stage, then F, B, I or W, then micro-batch',
                )
            yield Action(Kind(found[2]), int(found[1]), int(found[3]))
