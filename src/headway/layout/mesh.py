"""Mesh: named axes over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Mesh:
    """Ranks 0..size-1 laid out along named axes, the last one innermost.

        Mesh((("pipeline", 2), ("data", 3)))        data 0   1   2
                                       pipeline 0        0   1   2
                                       pipeline 1        3   4   5

    Ranks that differ in the last axis alone are neighbours, so the axis that talks most goes last, where a host's fast
    links are. Raises ValueError when an axis is named twice or has fewer than one rank.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, length in self.axes:
            if length < 1 or names.count(name) > 1:
                raise ValueError(f"axis {name!r} is {'named twice' if length >= 1 else f'{length} ranks long'}")

    @property
    def size(self) -> int:
        """Count the ranks."""
        return math.prod(length for _, length in self.axes)

    def length(self, axis: str) -> int:
        """Give the number of ranks along an axis; raises ValueError for an unknown axis."""
        return self.axes[self._index(axis)][1]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Give the place of a rank on each axis; raises ValueError for a rank outside 0..size-1."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on the mesh; its ranks are 0..{self.size - 1}")
        place = {}
        for name, length in reversed(self.axes):
            rank, place[name] = divmod(rank, length)
        return {name: place[name] for name, _ in self.axes}

    def rank(self, **coordinate: int) -> int:
        """Give the rank at a place; axes left out are at 0. Raises ValueError for a place that is not on the mesh."""
        for name, at in coordinate.items():
            if not 0 <= at < self.length(name):
                raise ValueError(f"{name} {at} is not on the mesh; axis {name!r} has {self.length(name)} ranks")
        rank = 0
        for name, length in self.axes:
            rank = rank * length + coordinate.get(name, 0)
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Give the ranks that share every other coordinate with `rank`, in the order of the axis."""
        place = self.coordinate(rank)
        return tuple(self.rank(**{**place, axis: at}) for at in range(self.length(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Give all groups along an axis; each rank is in one of them. Groups come in the order of their first rank."""
        others = [(name, length) for name, length in self.axes if name != axis]
        self._index(axis)
        places = (dict(zip((n for n, _ in others), at, strict=True)) for at in product(*(range(k) for _, k in others)))
        return tuple(self.group(self.rank(**place), axis) for place in places)

    def _index(self, axis: str) -> int:
        names = [name for name, _ in self.axes]
        if axis not in names:
            raise ValueError(f"no axis {axis!r}; the axes are {', '.join(names)}")
        return names.index(axis)

    def __str__(self) -> str:
        return " x ".join(f"{name} {length}" for name, length in self.axes)
