"""The simulator against a naive one that ticks second by second, and against closed forms."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.schedule.action import COMPUTES, Action, Kind, Schedule, chain
from headway.schedule.build import forward_only, gpipe, one_f_one_b
from headway.schedule.lower import lower
from headway.schedule.simulate import Costs, simulate, totals
from tests.schedule.drawing import costs, edges, replaced, schedules, tick

F, B, W = Kind.F, Kind.B, Kind.W


@settings(max_examples=300)
@given(st.data())
def test_times_are_those_of_the_naive_simulator(data) -> None:
    schedule = data.draw(schedules())
    if data.draw(st.booleans()):
        schedule = lower(schedule, data.draw(edges(schedule.num_stages)))
    price = data.draw(costs(schedule))
    timeline = simulate(schedule, price)
    worked = {span.action: (span.start, span.end) for span in timeline.spans if span.action.kind in COMPUTES}
    reduced = {span.action: (span.start, span.end) for span in timeline.spans if span.action.kind is Kind.REDUCE}
    assert worked | reduced == tick(schedule, price)


@settings(max_examples=150)
@given(st.data())
def test_pairs_of_ranks_that_share_a_link_wait_for_each_other(data) -> None:
    schedule = data.draw(schedules())
    price = data.draw(costs(schedule, least=1))
    ranks = range(schedule.num_ranks)
    names = {(a, b): data.draw(st.sampled_from("xyz")) for a in ranks for b in ranks if data.draw(st.booleans())}
    price = replace(price, links=names)
    lowered = lower(schedule, data.draw(edges(schedule.num_stages)), reduce=False)
    timeline = simulate(lowered, price)
    worked = {span.action: (span.start, span.end) for span in timeline.spans if span.action.kind in COMPUTES}
    assert worked == tick(lowered, price)
    for name in "xyz":
        sent = [s for s in timeline.spans if s.action.kind in (Kind.SEND, Kind.SEND_GRAD)]
        pairs = [(s, (s.rank, schedule.placement[s.action.peer])) for s in sent]
        rows = sorted((s.start, s.end) for s, pair in pairs if names.get(pair) == name)
        assert all(before[1] <= after[0] for before, after in zip(rows, rows[1:], strict=False))
    if data.draw(st.booleans()):
        along = simulate(lower(schedule, chain(schedule.num_stages), reduce=False), price)
        plain = simulate(schedule, price)
        assert set(plain.spans) == {s for s in along.spans if s.action.kind in COMPUTES}
        assert plain.memory == along.memory


def test_a_shared_link_and_one_that_keeps_its_sender_busy() -> None:
    """Ranks 0 and 1 send at 1 s and at 4 s, 3 s each: apart, behind each other on one link, or instead of work."""
    schedule = lower(forward_only(3, 2), [(0, 1), (1, 2)])
    price = Costs((1.0, 1.0, 1.0), message={(0, 1): 3.0, (1, 2): 3.0})
    assert simulate(schedule, price).makespan == 1 + 3 + 3 + 1 + 3 + 1
    shared = simulate(schedule, replace(price, links={(0, 1): "switch", (1, 2): "switch"}))
    sends = [(s.start, s.end, s.rank) for s in shared.spans if s.action.kind is Kind.SEND]
    assert sorted(sends) == [(1, 4, 0), (4, 7, 0), (7, 10, 1), (10, 13, 1)] and shared.makespan == 14
    busy = simulate(schedule, replace(price, overlap=False))
    assert [s.start for s in busy.of(0) if s.action.kind is F] == [0, 4]


@settings(max_examples=300)
@given(st.data())
def test_memory_is_the_sum_of_what_lives(data) -> None:
    """At the middle of each interval between two events, count tensor by tensor what lives there."""
    schedule = data.draw(schedules())
    if data.draw(st.booleans()):
        schedule = lower(schedule, data.draw(edges(schedule.num_stages)))
    price = data.draw(costs(schedule))
    timeline = simulate(schedule, price)
    if schedule.edges is not None:
        peaks = tuple(timeline.peak_bytes(rank) for rank in range(timeline.num_ranks))
        assert totals(schedule, price) == (timeline.makespan, peaks)
    spans = {span.action: span for span in timeline.spans}
    for rank in range(schedule.num_ranks):
        steps = timeline.memory[rank]
        assert steps[0][0] == 0 and list(steps) == sorted(steps)
        assert steps[-1][1] == sum(price.static_bytes[s] for s in schedule.stages(rank))
        for (now, size), (following, _) in zip(steps, steps[1:], strict=False):
            assert now < following
            assert size == living(schedule, price, spans, rank, (now + following) / 2)


def living(schedule: Schedule, price: Costs, spans, rank: int, now: float) -> int:
    """Add up the bytes on a rank at one moment."""
    total = sum(price.static_bytes[s] for s in schedule.stages(rank))
    for action, span in spans.items():
        if action.kind in COMPUTES and span.rank == rank and span.start < now < span.end:
            total += price.temporary_bytes[action.stage]
    for m in range(schedule.num_micro):

        def end_of(stage: int, *kinds: Kind, m: int = m) -> float:
            return max(spans[Action(k, stage, m)].end for k in kinds if Action(k, stage, m) in spans)

        for s in schedule.stages(rank):
            freed = end_of(s, B, W) if schedule.trains else end_of(s, F)
            total += price.activation_bytes[s] * (spans[Action(F, s, m)].start < now < freed)
        for a, b in chain(schedule.num_stages) if schedule.edges is None else schedule.edges:
            used = spans[Action(F, b, m)].start
            ways = [(a, b, Kind.SEND, end_of(a, F), used)]
            if schedule.trains:
                ways.append((b, a, Kind.SEND_GRAD, end_of(b, B, Kind.I), end_of(a, B, Kind.I)))
            for source, target, kind, made, freed in ways:
                size = price.boundary_bytes[source, target]
                if schedule.local(source, target):
                    total += size * (schedule.placement[source] == rank and made < now < freed)
                    continue
                if schedule.edges is None:
                    leaves, arrives = flight(schedule, price, spans, source, target, m, made)
                else:
                    leaves, arrives = (lambda s: (s.start, s.end))(spans[Action(kind, source, m, target)])
                total += size * (schedule.placement[source] == rank and made < now < arrives)
                total += size * (schedule.placement[target] == rank and leaves < now < freed)
    return total


def flight(schedule, price, spans, source, target, micro, made):
    """Queue the messages of a link of a chain in the order in which they were made; give the times of one."""
    pair = schedule.placement[source], schedule.placement[target]
    order = {action: index for index, action in enumerate(schedule.ranks[pair[0]])}
    queue = []
    for action, span in spans.items():
        step = {F: 1, B: -1, Kind.I: -1}.get(action.kind)
        if step is None or not 0 <= action.stage + step < schedule.num_stages:
            continue
        if (schedule.placement[action.stage], schedule.placement[action.stage + step]) == pair:
            queue.append((order[action], span.end, action, action.stage + step))
    free = 0.0
    for _, end, action, to in sorted(queue, key=lambda entry: entry[0]):
        leaves = max(free, end)
        free = leaves + price.message[action.stage, to]
        if (action.stage, to, action.micro) == (source, target, micro) and end == made:
            return leaves, free
    raise AssertionError("no such message")


@given(st.data())
def test_a_chain_costs_the_same_lowered_or_not(data) -> None:
    schedule = data.draw(schedules())
    price = data.draw(costs(schedule))
    plain = simulate(schedule, price)
    lowered = simulate(lower(schedule, chain(schedule.num_stages), reduce=False), price)
    assert {s.action: s for s in plain.spans} == {s.action: s for s in lowered.spans if s.action.kind in COMPUTES}
    assert [plain.peak_bytes(r) for r in range(schedule.num_ranks)] == [
        lowered.peak_bytes(r) for r in range(schedule.num_ranks)
    ]


def test_unequal_stages_go_at_the_pace_of_the_slowest() -> None:
    """The bottleneck b computes all m micro-batches; the others fill and drain once."""
    forward, backward = (1.0, 3.0, 2.0), (2.0, 6.0, 4.0)
    timeline = simulate(gpipe(3, 5), Costs(forward, backward))
    assert timeline.makespan == sum(forward) + sum(backward) + 4 * (3.0 + 6.0)
    assert timeline.busy(1) == 5 * 9.0
    assert timeline.bubble == pytest.approx(1 - (15 + 45 + 30) / (3 * timeline.makespan))


def test_messages_pass_beside_the_work_one_at_a_time() -> None:
    """Four messages of 3 s behind forwards of 1 s: the link is the bottleneck, the sender is not."""
    timeline = simulate(lower(forward_only(2, 4), [(0, 1)]), Costs((1.0, 1.0), message={(0, 1): 3.0}))
    sends = [(s.start, s.end) for s in timeline.spans if s.action.kind is Kind.SEND]
    assert sends == [(1, 4), (4, 7), (7, 10), (10, 13)]
    waits = [(s.start, s.end) for s in timeline.spans if s.action.kind is Kind.RECV]
    assert waits == [(0, 4), (5, 7), (8, 10), (11, 13)]
    assert [s.end for s in timeline.of(0) if s.action.kind is F] == [1, 2, 3, 4]
    assert timeline.makespan == 14


def test_a_gradient_may_cost_something_else_than_what_it_is_of() -> None:
    both = simulate(gpipe(2, 1), Costs((1.0, 1.0), (1.0, 1.0), message={(0, 1): 2.0}))
    assert both.makespan == 4 + 2 + 2
    other = simulate(gpipe(2, 1), Costs((1.0, 1.0), (1.0, 1.0), message={(0, 1): 2.0, (1, 0): 5.0}))
    assert other.makespan == 4 + 2 + 5


def test_reduce_gap_and_halves() -> None:
    orders = ((Action(F, 0, 0), Action(Kind.I, 0, 0), Action(W, 0, 0)),)
    schedule = lower(Schedule("split", 1, 1, orders, (0,)), [])
    timeline = simulate(schedule, Costs((1.0,), (4.0,), reduce=(10.0,), gap=0.5))
    assert [(s.start, s.end) for s in timeline.spans] == [(0.5, 1.5), (2.0, 4.0), (4.5, 6.5), (7.0, 17.0)]
    assert timeline.bubble == pytest.approx(2.0 / 17.0)
    shares = simulate(schedule, Costs((1.0,), (4.0,), input=(3.0,), weight=(2.0,)))
    assert shares.makespan == 6.0


def test_activations_of_a_split_backward_stay_until_the_weights_are_done() -> None:
    orders = ((Action(F, 0, 0), Action(Kind.I, 0, 0), Action(W, 0, 0)),)
    price = Costs((1.0,), (2.0,), static_bytes=(100,), activation_bytes=(10,), temporary_bytes=(1,))
    timeline = simulate(Schedule("split", 1, 1, orders, (0,)), price)
    assert timeline.memory == (((0.0, 111), (1.0, 111), (2.0, 111), (3.0, 100)),)
    assert timeline.peak_bytes(0) == 111


def test_boundaries_are_held_on_both_sides_while_they_travel() -> None:
    price = Costs((1.0, 1.0), message={(0, 1): 2.0}, boundary_bytes={(0, 1): 7})
    timeline = simulate(forward_only(2, 1), price)
    assert timeline.memory == (((0.0, 0), (1.0, 7), (3.0, 0)), ((0.0, 0), (1.0, 7), (3.0, 0)))


def test_a_deadlock_is_named() -> None:
    schedule = replaced(gpipe(2, 1), 1, [Action(B, 1, 0), Action(F, 1, 0)])
    with pytest.raises(PlanError, match="can never finish"):
        simulate(schedule, Costs((1.0, 1.0), (1.0, 1.0)))


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="Costs.forward has 1 stages, schedule 'gpipe' 2"):
        simulate(gpipe(2, 1), Costs((1.0,), (1.0, 1.0)))
    with pytest.raises(ValueError, match="Costs.backward has 0 stages"):
        simulate(gpipe(2, 1), Costs((1.0, 1.0)))


def test_time_grows_with_the_number_of_actions_alone() -> None:
    """65,536 actions on 256 ranks: a second or so, where a quadratic simulator takes hours."""
    start = time.process_time()
    timeline = simulate(one_f_one_b(256, 128), Costs((1.0,) * 256, (2.0,) * 256, activation_bytes=(1,) * 256))
    assert time.process_time() - start < 10
    assert timeline.makespan == (128 + 255) * 3.0
