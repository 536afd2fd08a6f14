"""A schedule searched for: for measured seconds, within each rank's memory, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.errors import PlanError
from headway.schedule.action import Action, Edge, Kind, Schedule, chain
from headway.schedule.bound import lower_bound
from headway.schedule.catalogue import CATALOGUE
from headway.schedule.costs import Costs
from headway.schedule.dispatch import dispatch
from headway.schedule.justify import justify
from headway.schedule.lower import lower
from headway.schedule.refute import refuted
from headway.schedule.rules import NAMES, Rules, Table, first_rules, second_rules, tables
from headway.schedule.simulate import simulate
from headway.schedule.swaps import swaps
from headway.schedule.work import Orders, Work, timed, work_of
from headway.units import format_bytes

_REFUSED = 40
"""So many schedules of one round may turn out not to fit before there is less room for the next."""
_KEPT = 4
"""So many of the first rules are tried with other ways of treating weight gradients."""
_ACTIONS = 1500
"""Steps of fewer actions are tried more often, up to four times as often; larger ones less."""
_EQUAL = 1e-9
"""Makespans closer than this, relative, are the same."""


@dataclass(frozen=True)
class Searched:
    """A schedule with its makespan, and `bound`, a proved number of seconds below which no schedule can be.

    `start` says what it was found from: the name of a built schedule, "rules", "justified" or "swaps".
    """

    schedule: Schedule
    makespan: float
    bound: float
    start: str

    @property
    def gap(self) -> float:
        """Give how much longer than the bound it is, as a share of the bound: 0 is proved to be the best."""
        return self.makespan / self.bound - 1 if self.bound > 0 else 0.0


def searched(
    costs: Costs,
    placement: Sequence[int],
    num_micro: int,
    *,
    limits: Sequence[int] | None = None,
    split: bool = True,
    edges: Collection[Edge] | None = None,
    reduce: bool = False,
    tries: int = 400,
    enough: float = 1e-3,
) -> Searched:
    """Search for the shortest schedule for these costs; every rank that asks with the same arguments gets the same.

    `placement[stage]` is the rank of a stage. `limits` are the bytes of each rank, against the peak that `simulate`
    replays from `costs`. `split` allows input and weight gradients apart. With `edges` (and `reduce`) schedules are
    compared as `lower(schedule, edges, reduce=reduce)` would run; without, as a chain, unlowered. `tries` bounds the
    work, not the seconds, so that machines of any speed agree; a gap of `enough` ends it.

    By `simulate` the result is never longer than any built schedule that has this placement and fits. From there it
    goes on in three steps: rules by which ranks choose whenever they are free, a fixed set of them; schedules pushed to
    their end and back to their start (`justify`); swaps of neighbours along the critical path. The bound is raised
    between (`refuted`).

    Raises PlanError when not even one micro-batch at a time fits; ValueError for numbers that make no sense.
    """
    if not placement or num_micro < 1 or set(placement) != set(range(max(placement) + 1)) or tries < 0:
        raise ValueError(f"no ranks, no micro-batches, a rank without a stage, or tries below 0: {placement}")
    if limits is not None and len(limits) != max(placement) + 1:
        raise ValueError(f"limits of {len(limits)} ranks for {max(placement) + 1}")
    return _Search(costs, tuple(placement), num_micro, limits, split, edges, reduce).run(tries, enough)


class _Search:
    """The state of one search: the best so far, and the room that is left for activations."""

    def __init__(
        self,
        costs: Costs,
        placement: tuple[int, ...],
        num_micro: int,
        limits: Sequence[int] | None,
        split: bool,
        edges: Collection[Edge] | None,
        reduce: bool,
    ) -> None:
        self.costs, self.placement, self.num_micro, self.limits = costs, placement, num_micro, limits
        self.split, self.edges, self.reduce = split, edges, reduce
        self.best: Schedule | None = None
        self.makespan, self.start = math.inf, ""
        self.over: list[int] | None = None
        self.works: dict[frozenset[int], Work] = {}
        self.tables: dict[frozenset[int], Mapping[str, Table]] = {}
        self.splits = ([frozenset(range(len(placement)))] if split else []) + [frozenset[int]()]
        self.room = self._room()
        costs.check(self._one_at_a_time())
        self.bound = lower_bound(self._least(), self.room)

    def run(self, tries: int, enough: float) -> Searched:
        """Go through the steps, until the bound is near enough."""
        for _ in self._steps(tries):
            if self.makespan <= self.bound * (1 + max(enough, _EQUAL)):
                break
        self._join()
        if self.best is None:
            raise self._refusal()
        # Sums in another order may differ in their last digits; a bound is never above what was reached.
        return Searched(self.best, self.makespan, min(self.bound, self.makespan), self.start)

    def _steps(self, tries: int) -> Iterator[None]:
        """Try one schedule after the other, those that cost least to find first."""
        for name, schedule in self._built():
            self._offer(schedule, name)
            yield
        needed = self._needed()
        actions = 3 * len(self.placement) * self.num_micro
        effort = min(max(_ACTIONS / actions, 0.4), 4.0)
        rounds = 4 if all(left >= need for left, need in zip(self.room, needed, strict=True)) else 0
        for _ in range(rounds):
            self.over = None
            ranked: list[tuple[float, int, frozenset[int], Rules]] = []
            yield from self._rank(((each, r) for each in self.splits for r in first_rules(self._work(each))), ranked)
            best = sorted(ranked)[:_KEPT]
            yield from self._rank(((each, r) for _, _, each, first in best for r in second_rules(first)), ranked)
            if ranked:
                yield from self._less_split(*min(ranked))
                self.bound = refuted(self._least(), self._room(), self.bound, self.makespan)
                yield
                yield from self._justify(ranked, int(tries * effort) // 3)
            if ranked or self.over is None:
                break
            # What travels between stages and comes and goes takes room too: how much is known only now.
            rows = zip(self.room, self.over, needed, strict=True)
            self.room = [max(left - more, need) for left, more, need in rows]
        if self.best is not None:
            work, rounds = self._widest(), int(2 * tries * max(effort, 1.0))
            yield from swaps(work, work.orders(self.best), self.room, rounds, self._offer_orders(work, "swaps"))

    def _justify(self, ranked: list[tuple[float, int, frozenset[int], Rules]], tries: int) -> Iterator[None]:
        """Push schedules to the end and back, the best one and another that a rule of another kind gave."""
        if self.best is not None:
            work = self._widest()
            orders = work.orders(self.best)
            yield from justify(work, orders, self.room, tries, self._offer_orders(work, "justified"))
        others = [row for row in ranked if row[3].prefer[0] == "head"]
        if others:
            _, _, split, rules = min(others)
            work = self._work(split)
            orders = dispatch(work, rules, self.tables[split], self.room)
            yield from justify(work, orders, self.room, tries, self._offer_orders(work, "justified"))

    def _rank(
        self, several: Iterable[tuple[frozenset[int], Rules]], ranked: list[tuple[float, int, frozenset[int], Rules]]
    ) -> Iterator[None]:
        """Try rules, and put down those whose schedules fit, with their makespans."""
        refused = 0
        for split, rules in several:
            found = self._dispatch(split, rules)
            yield
            if math.isinf(found):
                refused += 1
            else:
                ranked.append((found, len(ranked), split, rules))
            if refused > _REFUSED:
                break

    def _less_split(self, best: float, number: int, split: frozenset[int], rules: Rules) -> Iterator[None]:
        """Split no more backwards than helps."""
        for rank in reversed(range(len(self.room))):
            less = split - {stage for stage, owner in enumerate(self.placement) if owner == rank}
            if less != split and (found := self._dispatch(less, rules)) <= best:
                best, split = found, less
            yield

    def _built(self) -> Iterator[tuple[str, Schedule]]:
        """Yield the built schedules that have this placement, and one micro-batch at a time."""
        num_stages, num_ranks = len(self.placement), len(self.room)
        chunks = num_stages // num_ranks
        for name, entry in CATALOGUE.items():
            if entry.allows(chunks) and chunks * num_ranks == num_stages and (self.split or not entry.split):
                schedule = entry.build(num_stages, self.num_micro, chunks)
                if schedule.placement == self.placement:
                    yield name, schedule
        yield "one at a time", self._one_at_a_time()

    def _one_at_a_time(self) -> Schedule:
        """Return the schedule that needs the least memory."""
        ranks: list[list[Action]] = [[] for _ in self.room]
        for micro in range(self.num_micro):
            for stage, rank in enumerate(self.placement):
                ranks[rank].append(Action(Kind.F, stage, micro))
            for stage, rank in reversed(list(enumerate(self.placement))):
                ranks[rank].append(Action(Kind.B, stage, micro))
        return Schedule("searched", len(self.placement), self.num_micro, tuple(map(tuple, ranks)), self.placement)

    def _dispatch(self, split: frozenset[int], rules: Rules) -> float:
        """Give the makespan of the schedule that rules give, infinite where it does not fit; keep it if it is best."""
        work = self._work(split)
        orders = dispatch(work, rules, self.tables[split], self.room)
        found = timed(work, orders)
        assert found is not None, "orders that were built in time can be run in time"
        if found[0] >= self.makespan or self._offer(work.schedule("searched", orders), "rules"):
            return found[0]
        return math.inf

    def _widest(self) -> Work:
        """Give work in which the best schedule takes no longer, with every backward split if that is so."""
        assert self.best is not None, "asked once there is a schedule"
        work = self._work(self.splits[0])
        found = timed(work, work.orders(self.best)) if self.split else None
        if found is not None and found[0] <= self.makespan * (1 + _EQUAL):
            return work
        return self._work(frozenset(stage for stage, _ in self.best.split))

    def _offer_orders(self, work: Work, start: str) -> Callable[[Orders], bool]:
        return lambda orders: self._offer(work.schedule("searched", orders), start)

    def _offer(self, schedule: Schedule, start: str) -> bool:
        """Keep a schedule if it fits and is the shortest so far; tell whether it fits."""
        lowered = schedule if self.edges is None else lower(schedule, self.edges, reduce=self.reduce)
        timeline = simulate(lowered, self.costs)
        if self.limits is not None:
            over = [max(timeline.peak_bytes(rank) - limit, 0) for rank, limit in enumerate(self.limits)]
            if any(over):
                self.over = over
                return False
        if timeline.makespan < self.makespan:
            self.best, self.makespan, self.start = replace(schedule, name="searched"), timeline.makespan, start
        return True

    def _join(self) -> None:
        """Make input and weight gradients one where they follow each other and no other stage waits for the first."""
        if self.best is None or not self.best.split:
            return
        sources = {target for _, target in self.edges or chain(len(self.placement))}
        ranks = tuple(tuple(_joined(actions, sources)) for actions in self.best.ranks)
        longest, start = self.makespan, self.start
        self.makespan = math.inf
        kept = self.best
        if not self._offer(replace(kept, ranks=ranks), start) or self.makespan > longest:
            self.best, self.makespan, self.start = kept, longest, start

    def _needed(self) -> list[int]:
        """Give the bytes of activations of one micro-batch on each rank."""
        held = self.costs.activation_bytes or (0,) * len(self.placement)
        return [
            sum(size for size, owner in zip(held, self.placement, strict=True) if owner == rank)
            for rank in range(len(self.room))
        ]

    def _refusal(self) -> PlanError:
        assert self.limits is not None, "without limits the first schedule fits"
        lowered = lower(self._one_at_a_time(), self.edges or chain(len(self.placement)), reduce=self.reduce)
        timeline = simulate(lowered, self.costs)
        _, rank, limit = max((timeline.peak_bytes(rank) - limit, rank, limit) for rank, limit in enumerate(self.limits))
        peak = format_bytes(timeline.peak_bytes(rank))
        return PlanError(
            f"no schedule fits: one micro-batch at a time takes {peak} on rank {rank}",
            place=f"its limit is {format_bytes(limit)}",
            remedy="smaller micro-batches, more stages, recompute or sharded states",
        )

    def _work(self, split: frozenset[int]) -> Work:
        if split not in self.works:
            self.works[split] = work_of(
                self.costs, self.placement, self.num_micro, split=split, edges=self.edges, reduce=self.reduce
            )
            if split in self.splits:
                self.tables[split] = tables(self.works[split])
            else:
                self.tables[split] = self._mixed(self.works[split])
        return self.works[split]

    def _mixed(self, work: Work) -> Mapping[str, Table]:
        """Put together the tables of work that is split in part from those of work split wholly and not at all."""
        bases = [(self._work(base), self.tables[base]) for base in self.splits]
        rows = [
            next((base.job[pair], table) for base, table in bases if pair in base.job)
            for pair in zip(work.kinds, work.stages, strict=True)
        ]
        return {name: [table[name][job] for job, table in rows] for name in NAMES}

    def _least(self) -> Work:
        """Give work that costs no more than any mixture of whole and split backwards."""
        whole = self._work(frozenset())
        if not self.split:
            return whole
        apart = self._work(self.splits[0])
        seconds = list(apart.seconds)
        for stage in range(len(self.placement)):
            first, second = apart.job[Kind.I, stage], apart.job[Kind.W, stage]
            backward = whole.seconds[whole.job[Kind.B, stage]]
            together = min(backward, apart.seconds[first] + apart.seconds[second])
            seconds[first] = min(apart.seconds[first], backward)
            seconds[second] = together - seconds[first]
        return replace(apart, seconds=tuple(seconds))

    def _room(self) -> list[float]:
        """Give the bytes that are left for activations beside what stays and the least that comes and goes."""
        if self.limits is None:
            return [math.inf] * (max(self.placement) + 1)
        room = list(map(float, self.limits))
        for rank in range(len(room)):
            stages = [stage for stage, owner in enumerate(self.placement) if owner == rank]
            if self.costs.static_bytes:
                room[rank] -= sum(self.costs.static_bytes[stage] for stage in stages)
            if self.costs.temporary_bytes:
                room[rank] -= min(self.costs.temporary_bytes[stage] for stage in stages)
        return room


def _joined(actions: Sequence[Action], sources: Collection[int]) -> Iterator[Action]:
    """Yield actions, an I and the W right behind it as one B where the stage has no stage before it."""
    for action, before, after in zip(actions, (None, *actions), (*actions[1:], None), strict=False):
        lonely = action.stage not in sources
        if lonely and action.kind is Kind.I and after == Action(Kind.W, action.stage, action.micro):
            yield Action(Kind.B, action.stage, action.micro)
        elif not (lonely and action.kind is Kind.W and before == Action(Kind.I, action.stage, action.micro)):
            yield action
