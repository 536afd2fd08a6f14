"""Replays the lifetimes of tensors over a timed schedule: the bytes that each rank holds, over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from headway.schedule.action import COMPUTES, Action, Kind, Schedule
from headway.schedule.costs import Costs
from headway.schedule.timeline import Span, Steps

Life = tuple[int, float, float, int]
"""(rank, from second, to second, bytes)"""
Flights = Mapping[Action, tuple[float, float]]
"""When each message leaves and has arrived, by its SEND or SEND_GRAD; where there is none, by what made it."""


def replay(schedule: Schedule, costs: Costs, spans: Iterable[Span], flights: Flights) -> tuple[Steps, ...]:
    """Give for each rank its bytes over time, from what lives when:

        static        always
        activations   start of F .. end of B (of W where split; of F when there is no backward)
        temporary     start .. end of each F, B, I and W
        boundary      at its maker    end of F        .. all has arrived
                      at its user     send starts     .. start of the F that uses it
        its gradient  at its maker    end of B or I   .. all has arrived
                      at its user     send starts     .. end of the B or I that uses it

    What passes between two stages of one rank lives from the end of its maker until its user frees it.
    """
    times = {span.action: span for span in spans if span.action.kind in COMPUTES}
    ledger: list[dict[float, int]] = [{} for _ in schedule.ranks]
    for lives in (_own(schedule, costs, times), _passed(schedule, costs, times, flights)):
        for rank, start, end, size in lives:
            # All that happens at one time is one step.
            changes = ledger[rank]
            changes[start] = changes.get(start, 0) + size
            changes[end] = changes.get(end, 0) - size
    static = [sum(costs.static_bytes[stage] for stage in schedule.stages(rank)) if costs.static_bytes else 0
              for rank in range(schedule.num_ranks)]  # fmt: skip
    return tuple(_steps(begin, changes) for begin, changes in zip(static, ledger, strict=True))


def _own(schedule: Schedule, costs: Costs, times: Mapping[Action, Span]) -> Iterator[Life]:
    """Yield what a stage holds for itself: activations and temporaries."""
    temporary, held, split = costs.temporary_bytes, costs.activation_bytes, schedule.split
    for (kind, stage, micro, _), (rank, _, start, end) in zip(times, times.values(), strict=True):
        if temporary:
            yield rank, start, end, temporary[stage]
        if held and kind is Kind.F:
            last = Kind.F if not schedule.trains else Kind.W if (stage, micro) in split else Kind.B
            yield rank, start, times[Action(last, stage, micro)].end, held[stage]


def _passed(schedule: Schedule, costs: Costs, times: Mapping[Action, Span], flights: Flights) -> Iterator[Life]:
    """Yield what passes between stages, forward and backward."""
    if not costs.boundary_bytes:
        return
    lowered, trains, micros = schedule.edges is not None, schedule.trains, range(schedule.num_micro)
    for source, targets in schedule.targets.items():
        for target in targets:
            there, back = costs.boundary(source, target), costs.boundary(target, source)
            for micro in micros:
                made, used = times[Action(Kind.F, source, micro)], times[Action(Kind.F, target, micro)]
                key = Action(Kind.SEND, source, micro, target) if lowered else made.action
                yield from _crossing(made, used, used.start, flights.get(key), there)
                if trains:
                    made, used = times[schedule.backward(target, micro)], times[schedule.backward(source, micro)]
                    key = Action(Kind.SEND_GRAD, target, micro, source) if lowered else made.action
                    yield from _crossing(made, used, used.end, flights.get(key), back)


def _crossing(made: Span, used: Span, freed: float, flight: tuple[float, float] | None, size: int) -> tuple[Life, ...]:
    if flight is None:
        return ((used.rank, made.end, freed, size),)
    return (made.rank, made.end, flight[1], size), (used.rank, flight[0], freed, size)


def _steps(begin: int, changes: dict[float, int]) -> Steps:
    """Sum up what is taken and freed."""
    moments = sorted(changes)
    if not moments or moments[0] > 0:
        moments.insert(0, 0.0)
    totals = accumulate((changes.get(moment, 0) for moment in moments), initial=begin)
    next(totals)
    return tuple(zip(moments, totals, strict=True))
