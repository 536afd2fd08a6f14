"""check: a schedule does everything once, where it belongs, and can finish; or the first fault, named."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from headway.errors import PlanError
from headway.schedule.action import COMPUTES, MESSAGES, Action, Kind, Schedule
from headway.schedule.numbered import in_any_order, numbered

_MIRROR = MappingProxyType({Kind.RECV: Kind.SEND, Kind.RECV_GRAD: Kind.SEND_GRAD})


def check(schedule: Schedule) -> None:
    """Raise PlanError for the first wrong, duplicate or missing action, for messages out of order, or a deadlock.

    O(actions). A lowered schedule is checked with its messages: each RECV has its SEND, in the same order on each
    edge, and each value that crosses ranks is sent.
    """
    _check_shape(schedule)
    found: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            fault = _fault(action, rank, schedule)
            if fault is None and action in found:
                fault = f"a second time (first on rank {found[action]})"
            if fault is not None:
                raise PlanError(
                    f"schedule {schedule.name!r}: {action.describe()} {fault}", place=f"rank {rank}, action {index}"
                )
            found[action] = rank
    for action in _expected(schedule):
        if action not in found:
            raise PlanError(
                f"schedule {schedule.name!r}: {action.describe()} is missing",
                place=f"rank {schedule.placement[action.stage]}, which holds stage {action.stage}",
            )
    _check_message_order(schedule)
    for _ in in_any_order(numbered(schedule)):
        pass


def _check_shape(schedule: Schedule) -> None:
    where = f"schedule {schedule.name!r}"
    if schedule.num_stages < 1 or schedule.num_micro < 1 or not schedule.ranks:
        raise PlanError(
            f"{where}: needs at least one stage, one micro-batch and one rank",
            place=f"{schedule.num_stages} stages, {schedule.num_micro} micro-batches, {schedule.num_ranks} ranks",
        )
    if len(schedule.placement) != schedule.num_stages:
        raise PlanError(f"{where}: places {len(schedule.placement)} stages, has {schedule.num_stages}")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.num_ranks:
            raise PlanError(f"{where}: stage {stage} is placed on rank {rank}; ranks are 0..{schedule.num_ranks - 1}")
    for source, target in schedule.edges or ():
        if not 0 <= source < target < schedule.num_stages:
            raise PlanError(f"{where}: an edge from stage {source} to stage {target}; values pass to later stages only")


def _fault(action: Action, rank: int, schedule: Schedule) -> str | None:
    """Say what is wrong with one action on this rank, by itself."""
    if not 0 <= action.stage < schedule.num_stages:
        return f"is of an unknown stage; stages are 0..{schedule.num_stages - 1}"
    if not 0 <= action.micro < schedule.num_micro:
        return f"is of an unknown micro-batch; micro-batches are 0..{schedule.num_micro - 1}"
    if schedule.placement[action.stage] != rank:
        return f"is on the wrong rank: rank {schedule.placement[action.stage]} holds stage {action.stage}"
    if action.kind is Kind.B and (action.stage, action.micro) in schedule.split:
        return "is whole and split at once: the schedule has its I too"
    if action.kind is Kind.W and (action.stage, action.micro) not in schedule.split:
        return "has no I"
    if action.kind in COMPUTES or action.kind is Kind.REDUCE:
        if action.peer is not None:
            return f"has a peer, stage {action.peer}, but is no message"
        return "is not of micro-batch 0: there is one a step" if action.kind is Kind.REDUCE and action.micro else None
    return _message_fault(action, schedule)


def _message_fault(action: Action, schedule: Schedule) -> str | None:
    if action.peer is None:
        return "has no peer stage"
    if schedule.edges is None:
        return "is a message, but the schedule was not lowered: it names no edges"
    if not 0 <= action.peer < schedule.num_stages:
        return f"is with an unknown stage; stages are 0..{schedule.num_stages - 1}"
    forward = action.kind in (Kind.SEND, Kind.RECV_GRAD)
    edge = (action.stage, action.peer) if forward else (action.peer, action.stage)
    if edge not in schedule.edges:
        return f"is on no edge: stage {edge[1]} uses nothing that stage {edge[0]} makes"
    if schedule.local(*edge):
        return "is between two stages of the same rank, which hand over without a message"
    return None


def _expected(schedule: Schedule) -> Iterator[Action]:
    """Yield every action that must be there, micro-batch by micro-batch; reductions are not required."""
    crossing = [edge for edge in schedule.edges or () if not schedule.local(*edge)]
    for micro in range(schedule.num_micro):
        for stage in range(schedule.num_stages):
            yield Action(Kind.F, stage, micro)
            if schedule.trains:
                yield schedule.backward(stage, micro)
                if (stage, micro) in schedule.split:
                    yield Action(Kind.W, stage, micro)
        for source, target in crossing:
            yield Action(Kind.SEND, source, micro, target)
            yield Action(Kind.RECV, target, micro, source)
            if schedule.trains:
                yield Action(Kind.SEND_GRAD, target, micro, source)
                yield Action(Kind.RECV_GRAD, source, micro, target)


def _check_message_order(schedule: Schedule) -> None:
    """Each edge and direction is a queue: what is sent first must be received first."""
    queues: dict[tuple[Kind, int, int], list[int]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind in MESSAGES and action.peer is not None:
                queues.setdefault((action.kind, action.stage, action.peer), []).append(action.micro)
    for (kind, stage, peer), received in queues.items():
        if kind not in _MIRROR:
            continue
        sent = queues[_MIRROR[kind], peer, stage]
        for first, second in zip(sent, received, strict=True):
            if first != second:
                raise PlanError(
                    f"schedule {schedule.name!r}: {Action(kind, stage, second, peer).describe()} is out of order",
                    place=f"rank {schedule.placement[stage]} waits for it where rank {schedule.placement[peer]} "
                    f"sends micro-batch {first}",
                    remedy="the same order of micro-batches on both ranks",
                )
