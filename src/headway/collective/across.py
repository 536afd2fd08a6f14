"""Across: groups of copies that each share out a whole model; sums of one group are summed with those of the others.

host 0: ranks 0, 1     0 owns a, 1 owns b     gradients to their owners, new values back: over the fast link
host 1: ranks 2, 3     2 owns a, 3 owns b
across                 0 with 2: the sums of a;  1 with 3: those of b               over the slow one, once a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.collective.sums import make_sums
from headway.collective.two_shot import Reduction
from headway.collective.world import Group, Pending, World
from headway.errors import PlanError
from headway.layout.mesh import Mesh


@dataclass(frozen=True)
class Sharers:
    """Who shares a model out: this rank's group of `near` ranks; `across`, those of other groups that own the same.

    `copies` are all of them, `model` the ranks, over all stages, that have one whole model among them.
    """

    near: Group
    across: tuple[int, ...]
    copies: Group
    model: Group

    @property
    def several(self) -> bool:
        """Whether there is more than one group."""
        return len(self.across) > 1


def sharers(world: World, copies: int, pipeline: int, ranks: int | None) -> Sharers:
    """Return whom this rank shares with, `ranks` in a group (None: all copies). Every rank of the world calls it.

    Raises PlanError when groups of so many are not all copies.
    """
    each = ranks or copies
    if copies % each:
        raise PlanError(
            f"{copies} copies cannot share out in groups of {each}", place="shard_ranks", remedy="a divisor of data"
        )
    mesh = Mesh((("pipeline", pipeline), ("across", copies // each), ("near", each)))
    here = mesh.coordinate(world.rank)
    near = [world.group(group) for group in mesh.groups("near")]
    every = [world.group(group) for group in Mesh((("pipeline", pipeline), ("data", copies))).groups("data")]
    models = [
        world.group([mesh.rank(pipeline=p, across=a, near=n) for p in range(pipeline) for n in range(each)])
        for a in range(copies // each)
    ]
    mine = next(group for group in near if group.index is not None)
    return Sharers(mine, mesh.group(world.rank, "across"), every[here["pipeline"]], models[here["across"]])


class Across:
    """Sums tensors in place over `ranks`, float32 by `codec`: what each has summed for its group.

    Every member makes it, and starts the same sums in the same order, all from one thread.
    """

    def __init__(self, world: World, ranks: Sequence[int], codec: str) -> None:
        self._world, self._group = world, world.own_group(ranks)
        self._sums = make_sums(world, self._group, codec)

    def start(self, values: torch.Tensor, awaited: str = "a sum") -> Pending | Reduction:
        """Begin to sum `values` (contiguous [n]) in place."""
        if self._sums is None or values.dtype != torch.float32:
            return self._world.start_all_reduce(values, self._group, awaited=awaited)
        return self._sums.start(values, awaited, residual=None, slots=())

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._sums is not None:
            self._sums.close()
