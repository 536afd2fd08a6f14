"""backward_first: the greedy order of message-driven runtimes, worked out beforehand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from headway.schedule.action import Action, Kind, Schedule, needs


def backward_first(
    num_stages: int,
    num_micro: int,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule in which each free rank takes a ready backward before a ready forward.

    `forward` and `backward` are the seconds of each stage, by default 1 and 2; messages take no time. Stage s starts a
    forward only while it keeps fewer than `in_flight[s]` micro-batches, by default p - s.
    With equal stages this is 1F1B, action for action; with unequal ones the order bends to them.
    O(actions log actions + stages x moments at which something ends). Raises ValueError for numbers that make no sense.
    """
    seconds = {Kind.F: list(forward or [1.0] * num_stages), Kind.B: list(backward or [2.0] * num_stages)}
    room = [num_stages - stage for stage in range(num_stages)] if in_flight is None else list(in_flight)
    rows: list[Sequence[float]] = [*seconds.values(), room]
    if (
        num_stages < 1
        or num_micro < 1
        or any(len(row) != num_stages or not all(number > 0 for number in row) for row in rows)
    ):
        raise ValueError(
            f"backward_first needs 1 stage and 1 micro-batch at least, and for each stage seconds above 0 and room for "
            f"1 micro-batch, got {num_stages} and {num_micro}, {seconds[Kind.F]}, {seconds[Kind.B]} and {room}"
        )
    ranks: list[list[Action]] = [[] for _ in range(num_stages)]
    started = {Kind.F: [0] * num_stages, Kind.B: [0] * num_stages}
    free, ended, clock = [0.0] * num_stages, dict[Action, float](), [0.0]
    while clock:
        now = heapq.heappop(clock)
        while clock and clock[0] == now:
            heapq.heappop(clock)
        for stage in range(num_stages):
            forwards, backwards = started[Kind.F][stage], started[Kind.B][stage]
            if free[stage] > now:
                continue
            choices = [Action(Kind.B, stage, backwards)] if backwards < forwards else []
            if forwards < num_micro and forwards - backwards < room[stage]:
                choices.append(Action(Kind.F, stage, forwards))
            for action in choices:
                if all(ended.get(need, math.inf) <= now for need in needs(action, num_stages)):
                    started[action.kind][stage] += 1
                    free[stage] = ended[action] = now + seconds[action.kind][stage]
                    ranks[stage].append(action)
                    heapq.heappush(clock, ended[action])
                    break
    return Schedule("backward_first", num_stages, num_micro, tuple(map(tuple, ranks)), tuple(range(num_stages)))
