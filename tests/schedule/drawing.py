"""Random schedules that can finish, and a second, naive statement of order and time to hold the real ones against."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from headway.schedule.action import Action, Kind, Schedule
from headway.schedule.costs import Costs

F, B, W = Kind.F, Kind.B, Kind.W


@st.composite
def schedules(draw, *, max_stages: int = 5, max_micro: int = 4) -> Schedule:
    """Draw any placement and any order that can finish, with micro-batches in order in each stage.

    Grown by always taking some action of which all that a chain of stages demands is done, so it cannot deadlock.
    """
    num_stages, num_micro = draw(st.integers(1, max_stages)), draw(st.integers(1, max_micro))
    num_ranks = draw(st.integers(1, num_stages))
    placement = tuple(draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages))
    trains = draw(st.integers(0, 4)) > 0
    split = {(s, m) for s in range(num_stages) for m in range(num_micro) if draw(st.booleans())} if trains else set()
    left = {}
    for stage in range(num_stages):
        left[F, stage] = list(range(num_micro))
        if trains:
            left[B, stage] = list(range(num_micro))
            left[W, stage] = [m for m in range(num_micro) if (stage, m) in split]
    done: set[tuple[Kind, int, int]] = set()
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]

    def ready(kind: Kind, stage: int, micro: int) -> bool:
        if kind is F:
            return stage == 0 or (F, stage - 1, micro) in done
        if kind is W:
            return (B, stage, micro) in done
        return (F, stage, micro) in done and (stage + 1 == num_stages or (B, stage + 1, micro) in done)

    while any(left.values()):
        choices = [(*key, micros[0]) for key, micros in left.items() if micros and ready(*key, micros[0])]
        kind, stage, micro = draw(st.sampled_from(choices))
        left[kind, stage].pop(0)
        done.add((kind, stage, micro))
        written = Kind.I if kind is B and (stage, micro) in split else kind
        ranks[placement[stage]].append(Action(written, stage, micro))
    return Schedule("drawn", num_stages, num_micro, tuple(map(tuple, ranks)), placement)


@st.composite
def edges(draw, num_stages: int) -> list[tuple[int, int]]:
    """Draw edges of a model: some of the chain, some skip connections."""
    pairs = [(a, b) for a in range(num_stages) for b in range(a + 1, num_stages)]
    return [pair for pair in pairs if draw(st.integers(0, 3)) > (0 if pair[0] + 1 == pair[1] else 2)]


@st.composite
def costs(draw, schedule: Schedule, *, least: int = 0) -> Costs:
    """Draw whole seconds and bytes, zeros among them unless `least` is more."""
    small = st.integers(least, 4)
    pairs = [(a, b) for a in range(schedule.num_stages) for b in range(schedule.num_stages) if a != b]

    def row() -> tuple[int, ...]:
        return tuple(draw(small) for _ in range(schedule.num_stages))

    return Costs(
        forward=row(),
        backward=row(),
        input=row(),
        weight=row(),
        reduce=row(),
        message={pair: draw(small) for pair in pairs},
        boundary_bytes={pair: draw(small) for pair in pairs},
        static_bytes=row(),
        activation_bytes=row(),
        temporary_bytes=row(),
        gap=draw(st.integers(0, 1)),
        overlap=draw(st.booleans()),
    )


def demands(action: Action, schedule: Schedule) -> list[Action]:
    """State the order once more, by looking through the whole schedule for each action's causes."""
    everything = [other for actions in schedule.ranks for other in actions]
    s, m, peer = action.stage, action.micro, action.peer
    kinds = {
        F: lambda o: o.kind is F and o.stage == s - 1 and o.micro == m,
        B: lambda o: o.micro == m and ((o.kind is F and o.stage == s) or (o.kind in (B, Kind.I) and o.stage == s + 1)),
        W: lambda o: o.micro == m and o.kind is Kind.I and o.stage == s,
        Kind.SEND: lambda o: o.micro == m and o.kind is F and o.stage == s,
        Kind.RECV: lambda o: o == Action(Kind.SEND, peer, m, s),
        Kind.SEND_GRAD: lambda o: o.micro == m and o.kind in (B, Kind.I) and o.stage == s,
        Kind.RECV_GRAD: lambda o: o == Action(Kind.SEND_GRAD, peer, m, s),
        Kind.REDUCE: lambda o: o.kind in (B, W) and o.stage == s,
    }
    if schedule.edges is not None:
        arriving = [a for a, b in schedule.edges if b == s]
        leaving = [b for a, b in schedule.edges if a == s]
        here = schedule.placement[s]

        def forward(o: Action) -> bool:
            local = o.kind is F and o.stage in arriving and schedule.placement[o.stage] == here
            return o.micro == m and (local or (o.kind is Kind.RECV and o.stage == s))

        def backward(o: Action) -> bool:
            local = o.kind in (B, Kind.I) and o.stage in leaving and schedule.placement[o.stage] == here
            return o.micro == m and (
                local or (o.kind is Kind.RECV_GRAD and o.stage == s) or (o.kind is F and o.stage == s)
            )

        kinds[F], kinds[B] = forward, backward
    test = kinds[B if action.kind is Kind.I else action.kind]
    return [other for other in everything if test(other)]


def can_finish(schedule: Schedule) -> bool:
    """Run the ranks, blocked or not, round and round until nothing moves."""
    done: set[Action] = set()
    cursor = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            if cursor[rank] < len(actions) and set(demands(actions[cursor[rank]], schedule)) <= done:
                done.add(actions[cursor[rank]])
                cursor[rank] += 1
                moved = True
    return all(at == len(actions) for at, actions in zip(cursor, schedule.ranks, strict=True))


def tick(schedule: Schedule, price: Costs) -> dict[Action, tuple[int, int]]:
    """Simulate second by second, whole seconds alone: (start, end) of each computation and REDUCE.

    Every rank that is free looks at its next action, every link at the head of its queue, again and again until
    nothing more can happen in this second.
    """
    seconds = {F: price.forward, B: price.backward, Kind.I: price.input, W: price.weight, Kind.REDUCE: price.reduce}
    cause = {a: demands(a, schedule) for actions in schedule.ranks for a in actions}
    times: dict[Action, tuple[int, int]] = {}
    ended: dict[Action, int] = {}
    arrived: dict[tuple[Action, int], int] = {}
    queues: dict[object, list[tuple[Action, int, int, int]]] = {}
    link_free: dict[object, int] = {}
    cursor, rank_free = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    now = 0

    def post(action: Action, to_stage: int) -> None:
        pair = schedule.placement[action.stage], schedule.placement[to_stage]
        if pair[0] != pair[1]:
            cost = price.message[action.stage, to_stage]
            queues.setdefault(price.links.get(pair, pair), []).append((action, pair[1], cost, ended[action]))
            if not price.overlap:
                rank_free[pair[0]] = math.inf

    def available(cause: Action, rank: int) -> bool:
        if schedule.placement[cause.stage] == rank:
            return cause in ended and ended[cause] <= now
        return (cause, rank) in arrived and arrived[cause, rank] <= now

    while any(at < len(actions) for at, actions in zip(cursor, schedule.ranks, strict=True)):
        moved = True
        while moved:
            moved = False
            for pair, queue in queues.items():
                while queue and link_free.get(pair, 0) <= now and queue[0][3] <= now:
                    action, rank, cost, _ = queue.pop(0)
                    arrived[action, rank] = link_free[pair] = now + cost
                    if not price.overlap:
                        rank_free[schedule.placement[action.stage]] = now + cost
                    moved = True
            for rank, actions in enumerate(schedule.ranks):
                while cursor[rank] < len(actions) and rank_free[rank] <= now:
                    action = actions[cursor[rank]]
                    if not all(available(c, rank) for c in cause[action]):
                        break
                    if action.kind in seconds:
                        start = now + int(price.gap)
                        times[action] = start, start + seconds[action.kind][action.stage]
                        rank_free[rank] = times[action][1]
                    ended[action] = times[action][1] if action.kind in seconds else now
                    if schedule.edges is not None and action.kind in (Kind.SEND, Kind.SEND_GRAD):
                        post(action, action.peer)
                    elif schedule.edges is None and action.kind is F and action.stage + 1 < schedule.num_stages:
                        post(action, action.stage + 1)
                    elif schedule.edges is None and action.kind in (B, Kind.I) and action.stage > 0:
                        post(action, action.stage - 1)
                    cursor[rank] += 1
                    moved = True
        now += 1
        assert now < 10_000, "deadlock"
    return times


def swapped(schedule: Schedule, rank: int, index: int) -> Schedule:
    """Exchange an action with the next one of its rank."""
    actions = list(schedule.ranks[rank])
    actions[index : index + 2] = reversed(actions[index : index + 2])
    return replaced(schedule, rank, actions)


def replaced(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    """Give one rank other actions."""
    ranks = (*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)
