"""Swaps: shorter orders by exchanging neighbours on the critical path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from headway.schedule.work import Orders, Work, peak, timed


def swaps(
    work: Work, orders: Orders, room: Sequence[float], tries: int, take: Callable[[Orders], bool]
) -> Iterator[None]:
    """Swap neighbours of a rank that stand on the critical path; yield after each round.

    `take` is shown each of the ever shorter orders, and says whether they are good in every other way.
    A tabu search: of a few such swaps it takes the best, be it worse than before, and does not take one back for a few
    rounds (Nowicki and Smutnicki 1996, for the job shop). At most `tries` orders are timed, and a few.
    """
    chance = random.Random(0)
    orders = [list(order) for order in orders]
    found = timed(work, orders)
    if found is None:
        return
    best, ends = found
    barred: dict[tuple[int, int, int], int] = {}
    turn = 0
    while tries > 0:
        turn += 1
        places = _critical(work, orders, ends)
        chance.shuffle(places)
        move = None
        for rank, at in places[:8]:
            order = orders[rank]
            pair = rank, order[at], order[at + 1]
            order[at], order[at + 1] = order[at + 1], order[at]
            if peak(work, order) <= room[rank]:
                tries -= 1
                found = timed(work, orders)
                free = barred.get(pair, 0) < turn
                if found is not None and (free or found[0] < best) and (move is None or found[0] < move[0]):
                    move = (*found, rank, at)
            order[at], order[at + 1] = order[at + 1], order[at]
        if move is None:
            tries -= 1
            yield
            continue
        length, ends, rank, at = move
        order = orders[rank]
        order[at], order[at + 1] = order[at + 1], order[at]
        barred[rank, order[at], order[at + 1]] = turn + chance.randint(5, 12)
        if length < best and take(orders):
            best = length
        yield


def _critical(work: Work, orders: Orders, ends: Sequence[float]) -> list[tuple[int, int]]:
    """List the (rank, place) of different jobs that the next one of their rank follows at once, on one longest path."""
    micros = work.num_micro
    where: dict[int, tuple[int, int]] = {}
    entries: list[list[int]] = []
    for rank, order in enumerate(orders):
        done = [0] * work.num_jobs
        row = []
        for place, job in enumerate(order):
            entry = job * micros + done[job]
            done[job] += 1
            where[entry] = rank, place
            row.append(entry)
        entries.append(row)
    found = []
    at: int | None = max(where, key=lambda entry: ends[entry])
    while at is not None:
        rank, place = where[at]
        job, micro = divmod(at, micros)
        start = ends[at] - work.seconds[job]
        before = entries[rank][place - 1] if place else None
        if before is not None and ends[before] >= start * (1 - 1e-12):
            if orders[rank][place - 1] != job:
                found.append((rank, place - 1))
            at = before
        else:
            arrivals = ((ends[cause * micros + micro] + message, cause) for cause, message in work.causes[job])
            latest = max(arrivals, default=None)
            at = None if latest is None else latest[1] * micros + micro
    return found
