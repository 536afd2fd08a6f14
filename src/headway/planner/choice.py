"""Choice: one candidate, copies x stages, schedule and micro-batches; Setting: what all candidates share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headway.cost.cluster import Cluster
from headway.layout.mesh import Mesh
from headway.planner.estimate import order_of
from headway.planner.wire import EXACT, Wire
from headway.schedule.action import Schedule
from headway.schedule.catalogue import CATALOGUE

Family = tuple[int, int, int, str, str]


@dataclass(frozen=True)
class Choice:
    """A candidate: copies, ranks and stages, schedule, and each copy's micro-batches (samples at most, how many)."""

    data: int
    pipeline: int
    schedule: str
    micro_batch: int
    num_micro_batches: int
    chunks: int = 1
    given: tuple[str, ...] = ()  # an order of computations that is no named schedule's, a line for each rank
    shard: str = "none"

    @property
    def splits(self) -> bool:
        """Whether backwards are done in two parts."""
        return bool(self.order.split) if self.given else CATALOGUE[self.schedule].split

    @property
    def family(self) -> Family:
        """All but the micro-batches."""
        return self.data, self.pipeline, self.chunks, self.schedule, self.shard

    @property
    def num_stages(self) -> int:
        """Number of stages: `chunks` on each of `pipeline` ranks."""
        return self.pipeline * self.chunks

    @cached_property
    def order(self) -> Schedule:
        """The schedule, without messages."""
        return order_of(self.schedule, self.given, self.pipeline, self.num_micro_batches, self.chunks)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage, which is the same for any number of micro-batches."""
        return order_of(self.schedule, self.given, self.pipeline, 1, self.chunks).placement

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks that hold a stage, one for each copy."""
        return self.mesh.group(self.mesh.rank(pipeline=self.placement[stage]), "data")

    @property
    def mesh(self) -> Mesh:
        """Axes over ranks; copies innermost, so that those who reduce the most are neighbours."""
        return Mesh((("pipeline", self.pipeline), ("data", self.data)))


@dataclass(frozen=True)
class Setting:
    """What all candidates share: the machine, the samples of a step, the optimizer's states, the codecs there are."""

    cluster: Cluster
    global_batch: int
    optimizer_states: int
    wires: tuple[Wire, ...] = (EXACT,)
    sync_every: int = 1
    shard_ranks: int | None = None  # as asked
