"""Field: all candidates, of which bounds say enough of most, so that few are cut and fewer simulated."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headway.planner.bound import least_bytes, least_seconds
from headway.planner.choice import Choice, Family, Setting
from headway.planner.cuts import Look, cut_and_price, look
from headway.planner.price import Priced, priced
from headway.planner.program import Program

NEARLY = 0.01
"""Plans whose predicted times differ by less than this part are equally fast; the simpler one is taken."""

Which = Callable[[Choice], bool]


@dataclass(frozen=True)
class Entry:
    """A candidate with the program for its largest micro-batch, and where it is cut if that is given."""

    choice: Choice
    program: Program
    cuts: tuple[str, ...] | None = None


class Field:
    """Candidates, each priced when a question cannot be answered without it.

    Every answer is the one that pricing all of them would give. A candidate is known by three degrees: a bound on its
    seconds over all cuts; where its cuts are certain, a bound with them; its price. What is asked for is the least of
    something, so candidates are taken in the order of what is known of them, and each that comes first is looked at
    more closely, until it is priced: all others are bounded from below by more.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.memory = setting.cluster.device.memory_bytes
        self.entries: list[Entry] = []
        self._least: list[float] = []
        self._looks: dict[int, Look] = {}
        self._priced: dict[int, Priced] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Add candidates."""
        for entry in entries:
            self.entries.append(entry)
            self._least.append(least_seconds(entry.program, entry.choice, self.setting))

    @property
    def choices(self) -> list[Choice]:
        """All candidates, in the order in which they were added."""
        return [entry.choice for entry in self.entries]

    @property
    def num_priced(self) -> int:
        """Count the candidates that had to be priced."""
        return len(self._priced)

    def price(self, index: int) -> Priced:
        """Price a candidate."""
        if index not in self._priced:
            entry, ways = self.entries[index], self._look(index).ways
            if ways is not None:
                self._priced[index] = priced(ways, self.setting)
            else:
                self._priced[index] = cut_and_price(entry.program, entry.choice, self.setting, entry.cuts)
        return self._priced[index]

    def every(self, which: Which) -> list[Priced]:
        """Price all candidates that are wanted."""
        return [self.price(index) for index, entry in enumerate(self.entries) if which(entry.choice)]

    def by_seconds(self, which: Which, *, fit: bool, below: float = math.inf) -> Iterator[Priced]:
        """Yield the wanted candidates that fit in memory, or that do not, by seconds, then as they were added.

        Those of `below` seconds and more are left out.
        """
        heap = [(self._least[i], 0, i) for i, entry in enumerate(self.entries) if which(entry.choice)]
        heapq.heapify(heap)
        while heap:
            seconds, degree, index = heapq.heappop(heap)
            if seconds >= below:
                return
            if degree == 2:
                yield self._priced[index]
            elif degree == 1:
                found = self.price(index)
                if (found.peak <= self.memory) == fit:
                    heapq.heappush(heap, (found.seconds, 2, index))
            elif self._may(index, fit):
                seen = self._look(index)
                sharper = seen.least if fit or seen.ways is not None else 0.0
                heapq.heappush(heap, (max(seconds, sharper), 1, index))

    def by_bytes(self, which: Which) -> Iterator[Priced]:
        """Yield the wanted candidates by the bytes of their fullest rank, then as they were added."""
        heap = self._by_least_bytes(which)
        while heap:
            _, degree, index = heapq.heappop(heap)
            if degree:
                yield self._priced[index]
            else:
                heapq.heappush(heap, (self.price(index).peak, 1, index))

    def any_fits(self, which: Which = lambda choice: True) -> bool:
        """Tell whether some of the wanted candidates fit."""
        heap = self._by_least_bytes(which)
        while heap and heap[0][0] <= self.memory:
            _, _, index = heapq.heappop(heap)
            if self._may(index, True) and (self._look(index).fits or self.price(index).peak <= self.memory):
                return True
        return False

    def _by_least_bytes(self, which: Which) -> list[tuple[int, int, int]]:
        entries = ((index, entry) for index, entry in enumerate(self.entries) if which(entry.choice))
        heap = [(least_bytes(entry.program, entry.choice, self.setting), 0, index) for index, entry in entries]
        heapq.heapify(heap)
        return heap

    def _may(self, index: int, fit: bool) -> bool:
        """Tell whether a candidate may fit, or may not fit, as is asked, as far as that is known by now."""
        if index in self._priced:
            return (self._priced[index].peak <= self.memory) == fit
        return self._look(index).fits in (None, fit)

    def _look(self, index: int) -> Look:
        if index not in self._looks:
            entry = self.entries[index]
            self._looks[index] = look(entry.program, entry.choice, self.setting, entry.cuts)
        return self._looks[index]


def choose(field: Field, which: Which = lambda choice: True) -> Priced | None:
    """Return the fastest that fits; within 1 %, that of fewest stages, largest micro-batches, least memory."""
    near: list[Priced] = []
    for found in field.by_seconds(which, fit=True):
        if near and found.seconds > near[0].seconds * (1 + NEARLY):
            break
        near.append(found)
    return min(near, key=simplest, default=None)


def simplest(one: Priced) -> tuple[float, ...]:
    """Return by what plans that are equally fast are compared; the least is taken."""
    return one.choice.num_stages, one.choice.pipeline, -one.choice.micro_batch, one.peak, one.seconds


def runners_up(field: Field, best: Priced, count: int) -> list[Priced]:
    """Return the best of other families (copies, stages, schedule): those that fit by time, then the leanest."""
    found: dict[Family, Priced] = {}
    for one in field.by_seconds(lambda choice: choice.family != best.choice.family, fit=True):
        family = one.choice.family
        slowest = sorted(other.seconds for other in found.values())[count - 1 : count]
        if slowest and one.seconds > slowest[0]:
            break
        if family not in found:
            chosen = choose(field, lambda choice, family=family: choice.family == family)  # type: ignore[misc]
            assert chosen is not None, "one of them fits"
            found[family] = chosen
    shown = sorted(found.values(), key=lambda one: one.seconds)[:count]
    if len(shown) == count:
        return shown
    fitting = {best.choice.family, *found}
    lean: dict[Family, Priced] = {}
    for one in field.by_bytes(lambda choice: choice.family not in fitting):
        lean.setdefault(one.choice.family, one)
        if len(lean) == count - len(shown):
            break
    return [*shown, *lean.values()]
