"""Exchange: what all ranks tell each other at the end of a step: loss, metrics, memory, and who did what when."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.collective.world import World
from headway.run.execute import Seen
from headway.run.microbatch import LossParts
from headway.schedule.action import Action
from headway.schedule.timeline import Timeline, recorded

MAX_SPANS = 4096
"""Above this many actions over all ranks, each rank keeps its own timeline only."""


@dataclass(frozen=True)
class Told:
    """What a step came to, the same on every rank."""

    total: float
    count: float
    metrics: dict[str, float]
    peaks: tuple[int | None, ...]
    timeline: Timeline | None

    @property
    def loss(self) -> float | None:
        """The global mean; None when nothing was counted."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Exchange:
    """One small all-reduce a step carries everything. `clock` is this host's clock minus rank 0's, in seconds."""

    world: World
    clock: float

    @staticmethod
    def join(world: World) -> Exchange:
        """Compare clocks with rank 0; processes of one host have one clock."""
        world.barrier()
        now, host = time.perf_counter(), socket.gethostname()
        first, first_host = world.broadcast_object((now, host))
        return Exchange(world, 0.0 if host == first_host else now - first)

    def tell(
        self, losses: Sequence[LossParts], seen: Sequence[Seen], plan_of: Sequence[Sequence[Action]], peak: int | None
    ) -> Told:
        """Exchange a step's results. `plan_of[rank]` lists the actions of each rank, the same on every rank."""
        world = self.world
        slots = sum(len(actions) for actions in plan_of)
        with_spans = 0 < slots <= MAX_SPANS
        head, size = 3, world.size
        vector = torch.zeros(head + 2 * size + (2 * slots if with_spans else 0), dtype=torch.float64)
        metrics: dict[str, list[float]] = {}
        for part in losses:
            vector[0] += float(part.total)
            vector[1] += part.count
            for name, (total, count) in part.metrics.items():
                sums = metrics.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += count
        vector[2] = len(metrics)
        if peak is not None:
            vector[head + world.rank], vector[head + size + world.rank] = peak, 1.0
        if with_spans:
            start = head + 2 * size + 2 * sum(len(actions) for actions in plan_of[: world.rank])
            times = [moment - self.clock for _, begin, end in seen for moment in (begin, end)]
            vector[start : start + len(times)] = torch.tensor(times, dtype=torch.float64)
        if world.device.type != "cpu":
            vector = world.all_reduce(vector.to(world.device)).cpu()
        else:
            world.all_reduce(vector)
        peaks = tuple(int(vector[head + rank]) if vector[head + size + rank] else None for rank in range(size))
        timeline = self._timeline(vector[head + 2 * size :], plan_of, seen, with_spans)
        values = self._metrics(metrics) if vector[2] else {}
        return Told(float(vector[0]), float(vector[1]), values, peaks, timeline)

    def _timeline(
        self, times: torch.Tensor, plan_of: Sequence[Sequence[Action]], seen: Sequence[Seen], with_spans: bool
    ) -> Timeline | None:
        if not with_spans:
            rows: Any = [(self.world.rank, action, start, end) for action, start, end in seen]
            return recorded(rows, num_ranks=self.world.size) if rows else None
        pairs = iter(times.view(-1, 2).tolist())
        rows = [(rank, action, *next(pairs)) for rank, actions in enumerate(plan_of) for action in actions]
        return recorded(rows, num_ranks=self.world.size)

    def _metrics(self, mine: dict[str, list[float]]) -> dict[str, float]:
        """Sum metrics whose names only the ranks with the last stage know."""
        together: dict[str, list[float]] = {}
        for theirs in self.world.gather_objects(mine):
            for name, (total, count) in theirs.items():
                sums = together.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += count
        return {name: total / count for name, (total, count) in together.items() if count}
