"""Action, Schedule, and `needs`, the one rule of order; prints the grid.

A schedule is, for each pipeline rank, its actions in order. As built it holds computations only (F, B, I, W), and
stages form a chain; `headway.schedule.lower` adds the messages and reductions, along the edges of the real model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from headway.errors import PlanError


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    """forward of one micro-batch through one stage"""
    B = "B"
    """its whole backward: input gradient and weight gradient"""
    I = "I"  # noqa: E741 - the field's name for it
    """its input gradient alone"""
    W = "W"
    """its weight gradient alone, some time after I"""
    SEND = "SEND"
    """hand what F made to the stage `peer`, without waiting"""
    RECV = "RECV"
    """wait for what stage `peer` made"""
    SEND_GRAD = "SEND_GRAD"
    """hand the gradient of what stage `peer` made back to it, without waiting"""
    RECV_GRAD = "RECV_GRAD"
    """wait for the gradient from the stage `peer`, which used what this stage made"""
    REDUCE = "REDUCE"
    """sum this stage's gradients over the copies of the model; once a step, `micro` is 0"""


COMPUTES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})
MESSAGES = frozenset({Kind.SEND, Kind.RECV, Kind.SEND_GRAD, Kind.RECV_GRAD})


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One thing that one rank does once, for one stage and one micro-batch; `peer` is a message's other stage."""

    kind: Kind
    stage: int
    micro: int
    peer: int | None = None

    def __str__(self) -> str:
        """Write "2F0": stage 2, forward, micro-batch 0; "2SEND0>3" and "3RECV0<2" for messages."""
        if self.kind is Kind.REDUCE:
            return f"{self.stage}REDUCE"
        arrow = "" if self.peer is None else (">" if self.kind in (Kind.SEND, Kind.SEND_GRAD) else "<") + str(self.peer)
        return f"{self.stage}{self.kind}{self.micro}{arrow}"

    def describe(self) -> str:
        """Say what it is in an error: "B3 of stage 1", "SEND of micro-batch 3 from stage 1 to stage 2"."""
        if self.kind is Kind.REDUCE:
            return f"REDUCE of stage {self.stage}"
        if self.peer is None:
            return f"{self.kind}{self.micro} of stage {self.stage}"
        ways = (self.stage, self.peer) if self.kind in (Kind.SEND, Kind.SEND_GRAD) else (self.peer, self.stage)
        return f"{self.kind} of micro-batch {self.micro} from stage {ways[0]} to stage {ways[1]}"


Edge = tuple[int, int]
"""(source stage, target stage): the target uses something that the source makes."""


@dataclass(frozen=True)
class Schedule:
    """For each pipeline rank, its actions in order.

    `placement[stage]` is the pipeline rank that holds the stage. `edges` is None until `lower` has added messages;
    then it holds the pairs of stages between which values pass, those on the same rank included.
    A schedule without any backward (B, I, W) is for evaluation. `print` gives its grid, one column a slot.
    """

    name: str
    num_stages: int
    num_micro: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    edges: tuple[Edge, ...] | None = None

    @property
    def num_ranks(self) -> int:
        """Count the pipeline ranks."""
        return len(self.ranks)

    @cached_property
    def trains(self) -> bool:
        """Tell whether it has backwards; False for evaluation."""
        return any(action.kind in BACKWARDS for actions in self.ranks for action in actions)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """Give the (stage, micro) whose backward is done as I and W."""
        return frozenset((a.stage, a.micro) for actions in self.ranks for a in actions if a.kind is Kind.I)

    @cached_property
    def sources(self) -> dict[int, tuple[int, ...]]:
        """Map each stage to the stages it receives from, farthest first."""
        return _neighbours((target, source) for source, target in self._edges)

    @cached_property
    def targets(self) -> dict[int, tuple[int, ...]]:
        """Map each stage to the stages that use what it makes, nearest first."""
        return _neighbours(self._edges)

    @property
    def _edges(self) -> tuple[Edge, ...]:
        return chain(self.num_stages) if self.edges is None else self.edges

    def backward(self, stage: int, micro: int) -> Action:
        """Give the action that makes the input gradient of this stage and micro-batch: I where split, else B."""
        return Action(Kind.I if (stage, micro) in self.split else Kind.B, stage, micro)

    def local(self, stage: int, other: int) -> bool:
        """Tell whether two stages are on the same rank, so that values are handed over without a message."""
        return self.placement[stage] == self.placement[other]

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Count for each stage the micro-batches whose activations it keeps at once: started F without B or W."""
        most, now = [0] * self.num_stages, [0] * self.num_stages
        for action in (action for actions in self.ranks for action in actions):
            if action.kind is Kind.F:
                now[action.stage] = now[action.stage] + 1 if self.trains else 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind is Kind.B or action.kind is Kind.W:
                now[action.stage] -= 1
        return tuple(most)

    @cached_property
    def in_flight_together(self) -> tuple[int, ...]:
        """Count for each rank the micro-batches of which it keeps activations of every stage that it holds, at once."""
        most = []
        for rank, actions in enumerate(self.ranks):
            now, least = dict.fromkeys(self.stages(rank), 0), 0
            for action in actions:
                if action.kind is Kind.F:
                    now[action.stage] += 1
                    least = max(least, min(now.values()))
                elif action.kind is Kind.B or action.kind is Kind.W:
                    now[action.stage] -= 1
            most.append(least)
        return tuple(most)

    def stages(self, rank: int) -> tuple[int, ...]:
        """List the stages that a rank holds."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def __str__(self) -> str:
        return grid(self)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """List the edges of a model without skip connections."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def _neighbours(pairs: Iterator[Edge] | tuple[Edge, ...]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for stage, other in sorted(set(pairs)):
        found.setdefault(stage, []).append(other)
    return {stage: tuple(others) for stage, others in found.items()}


def needs(action: Action, within: Schedule | int) -> tuple[Action, ...]:
    """Give the actions that must be done before `action`: the only statement of order.

    `within` is the schedule, or the number of stages of a chain in which every backward is of `action`'s kind.
    Beside these an action needs its predecessor on its own rank, nothing else.

        F   what the stages before it made: their F, or once lowered the RECV of each edge that crosses ranks
        B I its own F, and the input gradients (B or I) of the stages after it, or the RECV_GRAD of each edge
        W   its I
        SEND its F; RECV its SEND; SEND_GRAD its B or I; RECV_GRAD its SEND_GRAD; REDUCE every B and W of its stage

    Raises ValueError for REDUCE without a schedule: how many micro-batches there are is not known then.
    """
    kind, stage, micro, peer = action.kind, action.stage, action.micro, action.peer
    if kind is Kind.F:
        return _inputs(stage, micro, within)
    if kind is Kind.B or kind is Kind.I:
        return (Action(Kind.F, stage, micro), *_gradients(kind, stage, micro, within))
    if kind is Kind.W:
        return (Action(Kind.I, stage, micro),)
    if kind is Kind.SEND:
        return (Action(Kind.F, stage, micro),)
    if kind is Kind.RECV and peer is not None:
        return (Action(Kind.SEND, peer, micro, stage),)
    if kind is Kind.SEND_GRAD:
        return (Action(Kind.B, stage, micro) if isinstance(within, int) else within.backward(stage, micro),)
    if kind is Kind.RECV_GRAD and peer is not None:
        return (Action(Kind.SEND_GRAD, peer, micro, stage),)
    if kind is Kind.REDUCE and not isinstance(within, int):
        last = (Kind.W if (stage, m) in within.split else Kind.B for m in range(within.num_micro))
        return tuple(Action(made, stage, m) for m, made in enumerate(last))
    raise ValueError(f"{action} needs a peer stage" if kind in MESSAGES else f"{action} needs a schedule")


def _inputs(stage: int, micro: int, within: Schedule | int) -> tuple[Action, ...]:
    if isinstance(within, int) or within.edges is None:
        return (Action(Kind.F, stage - 1, micro),) if stage > 0 else ()
    return tuple(
        Action(Kind.F, source, micro) if within.local(source, stage) else Action(Kind.RECV, stage, micro, source)
        for source in within.sources.get(stage, ())
    )


def _gradients(kind: Kind, stage: int, micro: int, within: Schedule | int) -> tuple[Action, ...]:
    if isinstance(within, int):
        return (Action(kind, stage + 1, micro),) if stage + 1 < within else ()
    if within.edges is None:
        return (within.backward(stage + 1, micro),) if stage + 1 < within.num_stages else ()
    return tuple(
        within.backward(target, micro) if within.local(target, stage) else Action(Kind.RECV_GRAD, stage, micro, target)
        for target in within.targets.get(stage, ())
    )


def walk(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Yield (rank, action, its needs) in an order that `needs` and each rank's own order allow, in O(actions).

    Sends do not wait for their receiver. Raises PlanError, after all that can be done, when the rest never can.
    """
    done: set[Action] = set()
    cursor = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        actions = schedule.ranks[rank]
        while cursor[rank] < len(actions):
            action = actions[cursor[rank]]
            needed = needs(action, schedule)
            missing = next((need for need in needed if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action, needed
            done.add(action)
            cursor[rank] += 1
            if action in waiting:
                ready.extend(waiting.pop(action))
    if waiting:
        raise deadlock(schedule, {rank: missing for missing, ranks in waiting.items() for rank in ranks}, cursor)


def deadlock(schedule: Schedule, missing: dict[int, Action], cursor: list[int]) -> PlanError:
    """Name a deadlock: the ranks that wait for each other in a circle, or the action that nobody does.

    `missing[rank]` is what a rank waits for, `cursor[rank]` the index of the action at which it waits.
    """
    owner = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
    rank = min(missing)
    path: list[int] = []
    while rank not in path and missing[rank] in owner:
        path.append(rank)
        rank = owner[missing[rank]]
    if rank not in path:
        circle, end = [rank], "which no rank does"
    else:
        circle, end = path[path.index(rank) :], "which comes later on the same rank"
    lines = []
    for at in circle:
        stuck = schedule.ranks[at][cursor[at]].describe()
        then = end if len(circle) == 1 else f"which is behind on rank {owner[missing[at]]}"
        lines.append(f"rank {at} stops at {stuck}: it needs {missing[at].describe()}, {then}")
    return PlanError(
        f"schedule {schedule.name!r} can never finish: {len(missing)} of {schedule.num_ranks} ranks wait for ever",
        place="; ".join(lines),
        remedy="order the actions so that each comes after all that headway.schedule.action.needs names for it",
    )


def grid(schedule: Schedule) -> str:
    """Draw the schedule: a row for each rank, a column for each slot, every computation one slot, messages none.

    Where a rank holds several stages, "2F0" is F0 of stage 2. "!" marks an action that can never start.
    """
    several = len(set(schedule.placement)) < schedule.num_stages
    cells: list[list[str]] = [[] for _ in schedule.ranks]
    done: dict[Action, int] = {}
    seen = [0] * schedule.num_ranks
    now = [0] * schedule.num_ranks
    try:
        for rank, action, needed in walk(schedule):
            start = max([now[rank], *(done[need] for need in needed)])
            if action.kind in COMPUTES:
                cells[rank] += ["."] * (start - len(cells[rank])) + [_label(action, several)]
                start += 1
            done[action] = now[rank] = start
            seen[rank] += 1
    except PlanError:
        for rank, actions in enumerate(schedule.ranks):
            cells[rank] += ["!" + _label(action, several) for action in actions[seen[rank] :]]
    columns = max(map(len, cells), default=0)
    width = max((len(cell) for row in cells for cell in row), default=0) + 2
    head = len(f"rank {schedule.num_ranks - 1}") + 2
    return "\n".join(
        (f"rank {rank}".ljust(head) + "".join(c.ljust(width) for c in row + ["."] * (columns - len(row)))).rstrip()
        for rank, row in enumerate(cells)
    )


def _label(action: Action, several: bool) -> str:
    return str(action) if several or action.kind not in COMPUTES else f"{action.kind}{action.micro}"
