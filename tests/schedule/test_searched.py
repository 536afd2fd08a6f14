"""The searched schedule against the optimum of tiny steps, against every built schedule, and against its own bound."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.schedule.action import COMPUTES, Action, Kind, Schedule, chain, needs
from headway.schedule.bound import lower_bound
from headway.schedule.build import one_f_one_b
from headway.schedule.catalogue import CATALOGUE
from headway.schedule.check import check
from headway.schedule.costs import Costs
from headway.schedule.lower import lower
from headway.schedule.searched import searched
from headway.schedule.simulate import simulate
from headway.schedule.timeline import Timeline
from headway.schedule.work import peak as held_by
from headway.schedule.work import timed, work_of
from tests.schedule.drawing import can_finish, costs, edges, schedules


def drawn(chance: random.Random, num_stages: int, *, tight: bool = True) -> Costs:
    """Draw whole seconds and bytes, so that makespans compare exactly."""

    def row(least: int, most: int) -> tuple[int, ...]:
        return tuple(chance.randint(least, most) for _ in range(num_stages))

    first, second = row(0, 4), row(0, 3)
    # Together input and weight gradients may cost more, or less, than the whole backward.
    backward = tuple(max(0, a + b + chance.choice((-1, 0, 0, 0, 1))) for a, b in zip(first, second, strict=True))
    pairs = [(a, b) for a in range(num_stages) for b in range(num_stages) if a != b]
    return Costs(
        forward=row(0, 4),
        backward=backward,
        input=first,
        weight=second,
        message={pair: chance.randint(0, 2) for pair in pairs},
        reduce=row(0, 2),
        static_bytes=row(0, 5),
        activation_bytes=row(0, 3),
        temporary_bytes=row(0, 2) if tight else (),
        boundary_bytes={pair: chance.randint(0, 1) for pair in pairs} if tight else {},
        gap=chance.randint(0, 1),
    )


def orders(rows: list[list[Action]], taken: tuple[Action, ...] = ()) -> Iterator[tuple[Action, ...]]:
    """Yield every way to merge rows that keep their order, each micro-batch forward, back, then to its weights."""
    if not any(rows):
        yield taken
    for index, row in enumerate(rows):
        if row and all(need in taken for need in needs(row[0], 1) if need.stage == row[0].stage):
            yield from orders([*rows[:index], row[1:], *rows[index + 1 :]], (*taken, row[0]))


def every_schedule(placement: tuple[int, ...], num_micro: int, split: set[tuple[int, int]]) -> Iterator[Schedule]:
    """Yield every schedule that takes micro-batches in order."""
    options = []
    for rank in range(max(placement) + 1):
        rows = []
        for stage in (stage for stage, owner in enumerate(placement) if owner == rank):
            micros = range(num_micro)
            rows.append([Action(Kind.F, stage, m) for m in micros])
            rows.append([Action(Kind.I if (stage, m) in split else Kind.B, stage, m) for m in micros])
            rows.append([Action(Kind.W, stage, m) for m in micros if (stage, m) in split])
        options.append(list(orders(rows)))
    for ranks in product(*options):
        yield Schedule("tried", len(placement), num_micro, ranks, placement)


def subsets(everything: list[tuple[int, int]]) -> list[set[tuple[int, int]]]:
    """List all sets of split backwards where those are few, else the two plain ones."""
    if len(everything) > 4:
        return [set(everything), set()]
    return [
        {p for p, keep in zip(everything, bits, strict=True) if keep}
        for bits in product((0, 1), repeat=len(everything))
    ]


TINY = (((0,), 3), ((0, 1), 1), ((0, 1), 2), ((0, 1), 3), ((0, 1, 2), 1), ((0, 1, 2), 2), ((0, 1, 1, 0), 1))


def test_tiny_steps_come_out_at_their_optimum() -> None:
    """Every order of whole, split and (where few) mixed backwards: the bound holds, the search reaches most."""
    chance = random.Random(0)
    exact = tried = 0
    for placement, num_micro in TINY * 2:
        costs = drawn(chance, len(placement))
        everything = [(stage, micro) for stage in range(len(placement)) for micro in range(num_micro)]
        schedules = (s for split in subsets(everything) for s in every_schedule(placement, num_micro, split))
        timelines = [simulate(schedule, costs) for schedule in schedules if can_finish(schedule)]
        peaks = [peak(timeline) for timeline in timelines]
        for limits in (None, chance.choice(peaks), min(peaks)):
            fit = [
                t.makespan for t, held in zip(timelines, peaks, strict=True) if limits is None or below(held, limits)
            ]
            found = searched(costs, placement, num_micro, limits=limits, enough=0)
            assert found.bound <= min(fit)
            assert len(everything) > 4 or min(fit) <= found.makespan
            tried += 1
            exact += found.makespan <= min(fit)
    assert exact >= 0.85 * tried


def peak(timeline: Timeline) -> tuple[int, ...]:
    return tuple(timeline.peak_bytes(rank) for rank in range(timeline.num_ranks))


def below(held: Sequence[int], limits: Sequence[int]) -> bool:
    return all(size <= limit for size, limit in zip(held, limits, strict=True))


def test_micro_batches_in_order_lose_nothing() -> None:
    """Two stages, two micro-batches, whole backwards: the best of all orders is one that takes them in order."""
    chance = random.Random(1)
    actions = [[Action(kind, stage, m) for kind in (Kind.F, Kind.B) for m in range(2)] for stage in range(2)]
    rows = [list(permutations(row)) for row in actions]
    schedules = [s for s in (Schedule("any", 2, 2, ranks, (0, 1)) for ranks in product(*rows)) if can_finish(s)]
    ordered = list(every_schedule((0, 1), 2, set()))
    assert len(schedules) > len(ordered)
    for _ in range(10):
        costs = drawn(chance, 2)
        best = min(simulate(schedule, costs).makespan for schedule in schedules)
        assert best == min(simulate(schedule, costs).makespan for schedule in ordered if can_finish(schedule))


@pytest.mark.parametrize("seed", range(14))
def test_never_longer_than_a_built_schedule_that_fits(seed: int) -> None:
    chance = random.Random(seed)
    chunks, num_ranks, num_micro = chance.choice((1, 1, 2, 3)), chance.randint(1, 4), chance.randint(1, 7)
    num_stages = num_ranks * chunks
    costs = drawn(chance, num_stages)
    rows = [entry.build(num_stages, num_micro, chunks) for entry in CATALOGUE.values() if entry.allows(chunks)]
    placement = chance.choice(rows).placement
    rows = [schedule for schedule in rows if schedule.placement == placement]
    edges = None if seed % 2 else [*chain(num_stages), *([(0, num_stages - 1)] if num_stages > 2 else [])]

    def priced(schedule: Schedule) -> Timeline:
        return simulate(schedule if edges is None else lower(schedule, edges, reduce=True), costs)

    timelines = [priced(schedule) for schedule in rows]
    for limits in (None, peak(chance.choice(timelines))):
        found = searched(costs, placement, num_micro, limits=limits, edges=edges, reduce=True, tries=60)
        check(found.schedule)
        timeline = priced(found.schedule)
        assert found.schedule.placement == placement and found.makespan == timeline.makespan >= found.bound
        assert limits is None or below(peak(timeline), limits)
        fitting = [t.makespan for t in timelines if limits is None or below(peak(t), limits)]
        assert found.makespan <= min(fitting)
        assert found == searched(costs, placement, num_micro, limits=limits, edges=edges, reduce=True, tries=60)
        whole = searched(costs, placement, num_micro, limits=None, split=False, edges=edges, reduce=True, tries=20)
        assert not whole.schedule.split


@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize("vee", [False, True])
def test_within_two_percent_of_the_bound(vee: bool, share: int) -> None:
    """Unequal stages and slow messages, in the memory of 1F1B and in three times that."""
    chance = random.Random(2)
    for num_ranks, num_micro in ((2, 8), (4, 16), (6, 24)):
        num_stages = 2 * num_ranks if vee else num_ranks
        placement = [min(s, num_stages - 1 - s) if vee else s for s in range(num_stages)]
        rows = [tuple(chance.uniform(0.7, 1.3) for _ in placement) for _ in range(3)]
        costs = Costs(
            rows[0],
            tuple(a + b for a, b in zip(rows[1], rows[2], strict=True)),
            input=rows[1],
            weight=rows[2],
            message={(s, s + 1): 0.2 for s in range(num_stages - 1)},
            activation_bytes=(1,) * num_stages,
        )
        found = searched(costs, placement, num_micro, limits=[share * num_stages] * num_ranks, enough=0.02)
        assert found.gap <= 0.02


@settings(max_examples=150)
@given(st.data())
def test_work_times_orders_as_the_simulator_does(data) -> None:
    schedule = data.draw(schedules(max_micro=3))
    split = {stage for stage, _ in schedule.split}
    assume(schedule.trains and len(schedule.split) == len(split) * schedule.num_micro)
    assume(set(schedule.placement) == set(range(schedule.num_ranks)))
    along = data.draw(edges(schedule.num_stages)) if data.draw(st.booleans()) else None
    price = data.draw(costs(schedule))
    lowered = schedule if along is None else lower(schedule, along)
    work = work_of(price, schedule.placement, schedule.num_micro, split=split, edges=along, reduce=along is not None)
    assert work.schedule("drawn", work.orders(schedule)) == schedule
    makespan, ends = timed(work, work.orders(schedule))
    timeline = simulate(lowered, price)
    assert makespan == timeline.makespan
    for span in timeline.spans:
        if span.action.kind in COMPUTES:
            job = work.job[span.action.kind, span.action.stage]
            assert ends[job * schedule.num_micro + span.action.micro] == span.end
    assert lower_bound(work) <= makespan
    room = [held_by(work, order) for order in work.orders(schedule)]
    assert lower_bound(work, room) <= makespan


def test_orders_that_deadlock_have_no_time() -> None:
    work = work_of(Costs((1, 1), (1, 1)), (0, 1), 1, split=())
    orders = work.orders(one_f_one_b(2, 1))
    assert timed(work, [orders[0][::-1], orders[1]]) is None


def test_what_does_not_fit_or_makes_no_sense_is_refused() -> None:
    costs = Costs((1.0, 1.0), (2.0, 2.0), activation_bytes=(2**20, 2**20), static_bytes=(2**20, 2**20))
    assert searched(costs, (0, 1), 3, limits=[2**21, 2**21]).schedule.in_flight == (1, 1)
    with pytest.raises(PlanError, match="one micro-batch at a time takes 2 MiB on rank 1") as caught:
        searched(costs, (0, 1), 3, limits=[2**21, 2**21 - 1])
    assert "its limit is" in str(caught.value)
    for placement, micros, limits in (((), 1, None), ((0, 1), 0, None), ((0, 2), 1, None), ((0, 1), 1, [1])):
        with pytest.raises(ValueError, match="no ranks|limits of"):
            searched(costs, placement, micros, limits=limits)
    with pytest.raises(ValueError, match="Costs.backward has 0 stages"):
        searched(Costs((1.0, 1.0)), (0, 1), 2)
