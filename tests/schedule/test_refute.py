"""Refuted makespans: never one that a schedule has, and more than the plain bound where that is not enough."""

from __future__ import annotations

import math
import random
from itertools import product

from headway.schedule.action import Kind
from headway.schedule.bound import lower_bound
from headway.schedule.refute import refuted
from headway.schedule.work import Orders, Work, peak, timed, work_of
from tests.schedule.equal_v import equal_v
from tests.schedule.test_searched import drawn

PLACED = ((0,), (0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0))


def shuffled(work: Work, chance: random.Random) -> Orders:
    """Draw orders that can be run: again and again some rank does something that is ready."""
    done = [0] * work.num_jobs
    orders: Orders = [[] for _ in range(work.num_ranks)]
    first = chance.choice((None, Kind.F, Kind.I, Kind.W))
    while any(count < work.num_micro for count in done):
        ready = [
            job
            for job in range(work.num_jobs)
            if done[job] < work.num_micro and all(done[cause] > done[job] for cause, _ in work.causes[job])
        ]
        liked = [job for job in ready if work.kinds[job] is first and chance.random() < 0.8]
        job = chance.choice(liked or ready)
        orders[work.rank[job]].append(job)
        done[job] += 1
    return orders


def test_no_makespan_of_a_schedule_is_refuted() -> None:
    """In the memory that it takes itself, every schedule stands."""
    chance = random.Random(0)
    raised = 0
    for _ in range(50):
        placement = chance.choice(PLACED)
        costs = drawn(chance, len(placement))
        stages = range(len(placement))
        work = work_of(costs, placement, chance.randint(1, 5), split={s for s in stages if chance.random() < 0.7})
        found = min((shuffled(work, chance) for _ in range(20)), key=lambda orders: timed(work, orders)[0])
        makespan, _ = timed(work, found)
        for room in ([peak(work, order) for order in found], [math.inf] * work.num_ranks):
            plain = lower_bound(work, room)
            bound = refuted(work, room, plain, 1.5 * makespan + 1)
            assert plain <= bound <= makespan * (1 + 1e-9)
            raised += bound > plain * (1 + 1e-3)
    assert raised >= 3


def every_order(work: Work) -> list[Orders]:
    """List all orders that take micro-batches in turn."""

    def merged(left: tuple[int, ...]) -> list[list[int]]:
        if not any(left):
            return [[]]
        found = []
        for job, count in enumerate(left):
            if count:
                rest = (*left[:job], count - 1, *left[job + 1 :])
                found += [[*order, job] for order in merged(rest)]
        return found

    counts = [tuple(work.num_micro * (rank == owner) for owner in work.rank) for rank in range(work.num_ranks)]
    return [list(orders) for orders in product(*map(merged, counts))]


def test_two_whole_stages_are_refuted_up_to_their_optimum() -> None:
    """All orders tried: what is left between the bound and the best is nothing, nearly always."""
    chance = random.Random(3)
    exact = 0
    for _ in range(30):
        work = work_of(drawn(chance, 2), (0, 1), 3, split=())
        priced = [(timed(work, orders), orders) for orders in every_order(work)]
        runs = [(found[0], orders) for found, orders in priced if found is not None]
        room = [peak(work, order) for order in chance.choice(runs)[1]]
        best = min(length for length, orders in runs if all(map(lambda o, r: peak(work, o) <= r, orders, room)))
        bound = refuted(work, room, lower_bound(work, room), best + 1, enough=1e-6)
        assert bound <= best * (1 + 1e-6)
        exact += bound >= best * (1 - 1e-5) - 1e-5
    assert exact >= 27


def test_a_step_that_the_plain_bound_leaves_open() -> None:
    """8 ranks with 2 equal stages each in a V, 8 micro-batches, messages of 0.6 s: 65.0 s is the optimum."""
    work = equal_v()
    room = [math.inf] * 8
    plain = lower_bound(work, room)
    assert plain < 64.3
    assert 64.9 < refuted(work, room, plain, 70.0) <= 65.0
