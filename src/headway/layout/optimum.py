"""Search for the best contiguous partition of places on a line: what load can be reached, and by which cuts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_STEPS = 2**12
"""Into how many steps the bottleneck is divided when loads are compared for being equal."""
_TIE = 2.0**18
"""Room below one unit of squared load for the sum of boundaries: 2**12 squared, 2**10 stages, 2**18 are 52 bits."""
_ROWS = 256


@dataclass(frozen=True)
class Line:
    """Places 0..n at which stages may begin or end; stage s holds what lies between two of them.

    Its load is `(work[last] - work[first]) / speeds[s] + boundary[first] + boundary[last]`.
    """

    work: Floats
    """[places] work before each place, not decreasing"""
    boundary: Floats
    """[places] what a cut there adds to both its stages; 0 at the ends"""
    speeds: Floats
    """[stages]"""
    earliest: tuple[Ints | None, ...]
    """[stages][places] the earliest place at which a stage that ends here may begin, not decreasing; None: any"""

    @property
    def num_stages(self) -> int:
        """Count the stages."""
        return len(self.speeds)

    def load(self, first: int, last: int, stage: int) -> float:
        """Give the load of a stage from place `first` to place `last`."""
        work = (self.work[last] - self.work[first]) / self.speeds[stage]
        return float(work + self.boundary[first] + self.boundary[last])

    def bounds(self) -> tuple[float, float]:
        """Give a lower bound of the bottleneck, and a load that no stage can exceed."""
        total = float(self.work[-1])
        least = max(total / float(self.speeds.sum()), float(np.diff(self.work).max() / self.speeds.max()))
        return least, total / float(self.speeds.min()) + 2 * float(self.boundary.max())

    def reached(self, value: float) -> list[Bools]:
        """Tell for s = 0..stages at which places s stages can end, none empty, none loaded more than `value`.

        A stage from i to j is allowed when work[i] - speed * boundary[i] >= work[j] + speed * (boundary[j] - value), so
        the greatest left side among the places reached decides: O(places) for a stage, O(places log places) where
        memory leaves a window of them.
        """
        here = np.zeros(len(self.work), dtype=np.bool_)
        here[0] = True
        found = [here]
        for stage, speed in enumerate(self.speeds):
            left = np.where(here, self.work - speed * self.boundary, -np.inf)
            window = self._windows[stage]
            best = np.full(len(left), -np.inf)
            if window is None:
                best[1:] = np.maximum.accumulate(left)[:-1]
            else:
                best = _range_max(left, window)
            here = best >= self.work + speed * (self.boundary - value)
            found.append(here)
            if not here.any():
                return found + [here] * (self.num_stages + 1 - len(found))
        return found

    def feasible(self, value: float) -> bool:
        """Tell whether some partition loads no stage with more than `value`."""
        return bool(self.reached(value)[-1][-1])

    @cached_property
    def _windows(self) -> tuple[tuple[Ints, Ints, Ints] | None, ...]:
        """For each stage the level and the two places at which `_range_max` looks for the window of each place."""
        places = np.arange(len(self.work))
        windows: list[tuple[Ints, Ints, Ints] | None] = []
        for first in self.earliest:
            if first is None:
                windows.append(None)
                continue
            width = places - np.minimum(first, places)
            level = np.log2(np.maximum(width, 1)).astype(np.int64)
            # An empty window points at the extra last place, which holds -inf.
            begin = np.where(width > 0, first, len(places))
            windows.append((level, begin, np.where(width > 0, places - 2**level, len(places))))
        return tuple(windows)

    def most_equal(self, value: float) -> list[int]:
        """Give the places where the stages begin and end in the best partition with no load above `value`.

        Best is the least sum of squared loads, in steps of value / 4096, then the least sum of boundaries, then the
        smaller first stages. Goes back from the end, over the places alone that the stages before can reach; O(n w) for
        each stage, where w is how many places it can hold. Raises ValueError when there is none.
        """
        reached = self.reached(value)
        scale = _STEPS / value if value > 0 else 0.0
        widest = float(self.boundary.max()) * self.num_stages
        price = self.boundary * (_TIE / widest if widest > 0 else 0.0)
        cost = np.full(len(self.work), np.inf)
        cost[-1] = 0.0
        following: list[Ints] = []
        for stage in reversed(range(self.num_stages)):
            cost, following_here = self._step_back(stage, value, scale, np.rint(price), reached[stage], cost)
            following.append(following_here)
        if not np.isfinite(cost[0]):
            raise ValueError(f"no partition has a bottleneck of {value} or less")
        places = [0]
        for step in reversed(following):
            places.append(int(step[places[-1]]))
        return places

    def _step_back(
        self, stage: int, value: float, scale: float, price: Floats, starts: Bools, cost: Floats
    ) -> tuple[Floats, Ints]:
        """Extend the best partitions that begin at each place by the stage before: its costs, and where it ends."""
        speed, first = self.speeds[stage], self.earliest[stage]
        begin, end = np.flatnonzero(starts), np.flatnonzero(np.isfinite(cost))
        low, high = self.work[begin] / speed - self.boundary[begin], self.work[end] / speed + self.boundary[end]
        rest = cost[end] + price[end]
        best, place = np.full(len(cost), np.inf), np.zeros(len(cost), dtype=np.int64)
        # No end beyond these can be within `value`: work does not decrease, boundaries only add.
        most = np.searchsorted(self.work[end] / speed, self.work[begin] / speed + value * (1 + 1e-9), side="right")
        for top in range(0, len(begin), _ROWS):
            rows = slice(top, top + _ROWS)
            columns = slice(int(np.searchsorted(end, begin[top], side="right")), int(most[rows].max()))
            if columns.start >= columns.stop:
                continue
            loads = high[None, columns] - low[rows, None]
            wrong = loads > value
            wrong |= end[None, columns] <= begin[rows, None]
            if first is not None:
                wrong |= first[end[columns]][None, :] > begin[rows, None]
            loads *= scale
            np.rint(loads, out=loads)
            loads *= loads
            loads *= _TIE
            loads += rest[None, columns]
            loads[wrong] = np.inf
            found = loads.argmin(axis=1)
            best[begin[rows]] = loads[np.arange(len(found)), found]
            place[begin[rows]] = end[columns][found]
        return best, place


def _range_max(values: Floats, window: tuple[Ints, Ints, Ints]) -> Floats:
    """Give the greatest value in each window [begin, place), by a table of the maxima of 1, 2, 4, ... places."""
    level, begin, tail = window
    table = np.full((int(level.max()) + 1, len(values) + 1), -np.inf)
    table[0, :-1] = values
    for power in range(1, len(table)):
        half = 2 ** (power - 1)
        table[power, :-half] = np.maximum(table[power - 1, :-half], table[power - 1, half:])
    found: Floats = np.maximum(table[level, begin], table[level, tail])
    return found
