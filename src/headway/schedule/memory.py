"""Replays the lifetimes of tensors over a timed schedule: the bytes that each rank holds, over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby

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
    ledger: list[list[tuple[float, int]]] = [[] for _ in schedule.ranks]
    for rank, start, end, size in (*_own(schedule, costs, times), *_passed(schedule, costs, times, flights)):
        ledger[rank] += (start, size), (end, -size)
    static = [sum(costs.static_bytes[stage] for stage in schedule.stages(rank)) if costs.static_bytes else 0
              for rank in range(schedule.num_ranks)]  # fmt: skip
    return tuple(_steps(begin, entries) for begin, entries in zip(static, ledger, strict=True))


def _own(schedule: Schedule, costs: Costs, times: Mapping[Action, Span]) -> Iterator[Life]:
    """Yield what a stage holds for itself: activations and temporaries."""
    for action, span in times.items():
        stage, micro = action.stage, action.micro
        if costs.temporary_bytes:
            yield span.rank, span.start, span.end, costs.temporary_bytes[stage]
        if costs.activation_bytes and action.kind is Kind.F:
            last = Kind.F if not schedule.trains else Kind.W if (stage, micro) in schedule.split else Kind.B
            yield span.rank, span.start, times[Action(last, stage, micro)].end, costs.activation_bytes[stage]


def _passed(schedule: Schedule, costs: Costs, times: Mapping[Action, Span], flights: Flights) -> Iterator[Life]:
    """Yield what passes between stages, forward and backward."""
    if not costs.boundary_bytes:
        return
    lowered = schedule.edges is not None
    for source, targets in schedule.targets.items():
        for target in targets:
            for micro in range(schedule.num_micro):
                made, used = times[Action(Kind.F, source, micro)], times[Action(Kind.F, target, micro)]
                key = Action(Kind.SEND, source, micro, target) if lowered else made.action
                yield from _crossing(made, used, used.start, flights.get(key), costs.boundary(source, target))
                if schedule.trains:
                    made, used = times[schedule.backward(target, micro)], times[schedule.backward(source, micro)]
                    key = Action(Kind.SEND_GRAD, target, micro, source) if lowered else made.action
                    yield from _crossing(made, used, used.end, flights.get(key), costs.boundary(target, source))


def _crossing(made: Span, used: Span, freed: float, flight: tuple[float, float] | None, size: int) -> Iterator[Life]:
    if flight is None:
        yield used.rank, made.end, freed, size
    else:
        yield made.rank, made.end, flight[1], size
        yield used.rank, flight[0], freed, size


def _steps(begin: int, entries: list[tuple[float, int]]) -> Steps:
    """Sum up what is taken and freed; all that happens at one time is one step."""
    entries.sort()
    changes = [(time, sum(size for _, size in group)) for time, group in groupby(entries, key=lambda entry: entry[0])]
    if not changes or changes[0][0] > 0:
        changes.insert(0, (0.0, 0))
    totals = accumulate((change for _, change in changes), initial=begin)
    next(totals)
    return tuple(zip((time for time, _ in changes), totals, strict=True))
