"""Plan: every decision on how to train as one frozen value, printable and readable from a file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.cost.cluster import Cluster
from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.layout.split import Split
from headway.planner.estimate import MessageEstimate, StageEstimate, costs_of, lowered, order_of
from headway.planner.fingerprint import Fingerprint, compare, fingerprint
from headway.schedule.action import Schedule
from headway.schedule.simulate import Costs, Timeline, simulate

FORMAT = 1


@dataclass(frozen=True)
class RunnerUp:
    """The best plan of another family (copies x stages), and what it would cost.

    `seconds` a step and `memory`, bytes on the fullest rank; `fits` says whether that is within a device.
    """

    data: int
    pipeline: int
    schedule: str
    micro_batch: int
    num_micro_batches: int
    seconds: float
    memory: int
    fits: bool
    shard: str = "none"
    chunks: int = 1


@dataclass(frozen=True)
class Plan:
    """Hold the whole choice: `data` copies on `pipeline` ranks, their cuts, the schedule and the micro-batches.

    Each rank of a pipeline holds `chunks` stages, so there are `pipeline * chunks` of them.
    `order` is the order of computations where `schedule` names none that is built in, a line for each pipeline rank.
    `num_micro_batches` is for each copy, `micro_batch` the samples of the largest; `cuts` name `ModelGraph.cuts`.
    `seconds` is the predicted time of a step (schedule, reduction, update), `memory` the predicted peak bytes of each
    rank. What `shard` says is shared out among all copies, or among `shard_ranks` at a time, in groups that hold the
    same. `neighbours` ranks of a host sum gradients among themselves first; `bucket_bytes` travel together at most.
    With `sync_every` above 1 copies train on their own for so many steps: not the training of one process.
    `reduction` says how losses of micro-batches make that of the batch: "mean", weighted by what they count, or "sum".
    Ranks are numbered with copies innermost: rank = stage * data + copy.
    """

    data: int
    pipeline: int
    schedule: str
    micro_batch: int
    num_micro_batches: int
    global_batch: int
    cuts: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    shard: str = "none"
    shard_ranks: int | None = None
    blocks: tuple[str, ...] = ()  # modules that are gathered one at a time, under shard="parameters"
    tensor: int = 1
    chunks: int = 1
    recompute: str = "none"
    precision: str = "float32"
    codec: str = "fp32"
    neighbours: int = 1
    bucket_bytes: int = 8 << 20
    sync_every: int = 1
    reduction: str = "mean"
    split: Split | None = None
    made_for: Fingerprint | None = None
    cluster: str = ""
    device_memory: int = 0
    seconds: float | None = None
    memory: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    binding: str = ""
    stages: tuple[StageEstimate, ...] = ()
    messages: tuple[MessageEstimate, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks that the plan uses."""
        return self.data * self.pipeline

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits over model, batch shapes and cluster shape; "" for a plan written by hand."""
        return self.made_for.digest if self.made_for else ""

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (source stage, target stage) between which activations cross."""
        return self.split.edges if self.split else ()

    @property
    def update_seconds(self) -> float:
        """Predicted seconds of the optimizer's step, part of `seconds`."""
        if not self.stages or self.split is None:
            return 0.0
        placed = self.lowered.placement
        ranks = range(self.pipeline)
        return max(sum(s.update for s, rank in zip(self.stages, placed, strict=True) if rank == r) for r in ranks)

    def order_for(self, num_micro_batches: int) -> Schedule:
        """Return the order of computations for so many micro-batches, without messages."""
        return order_of(self.schedule, self.order, self.pipeline, num_micro_batches, self.chunks)

    @cached_property
    def lowered(self) -> Schedule:
        """The schedule with its messages and reductions. Raises PlanError for a plan without a split."""
        if self.split is None:
            raise PlanError("a plan written by hand has no split", remedy="headway.plan(model, loss, batch, fixed=...)")
        return lowered(self.order_for(self.num_micro_batches), self.split, self.data)

    @cached_property
    def costs(self) -> Costs:
        """The estimates in the form that the simulator takes."""
        return costs_of(self.stages, self.messages)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The predicted schedule of one step as spans of work on each pipeline rank; None without estimates."""
        return simulate(self.lowered, self.costs) if self.stages and self.split else None

    def check_fingerprint(self, graph: ModelGraph, cluster: Cluster) -> None:
        """Raise PlanError naming the difference when the plan was made for another model, batch or cluster."""
        if self.made_for is not None:
            compare(self.made_for, fingerprint(graph, cluster))

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML."""
        import tomlkit

        document = tomlkit.dumps(_plain(self))
        what = f"{self.pipeline * self.chunks} stages x {self.data} copies"
        Path(path).write_text(f"# A plan made by Headway: {what}\n{document}")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from TOML. Raises PlanError when the file is missing, damaged, or has unknown fields."""
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as error:
            remedy = "plan.save(path) writes one, and so does headway plan script.py --save path"
            raise PlanError(f"no plan can be read: {error.strerror}", place=str(path), remedy=remedy) from error
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan file is not TOML: {error}", place=str(path), remedy="save it again") from error
        try:
            return _from_plain(values)
        except PlanError as error:
            raise PlanError(error.fact, place=str(path), remedy=error.remedy) from error
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan file is damaged: {error!r}", place=str(path), remedy="save it again") from error

    def explain(self) -> str:
        """Return the long explanation: decisions, reasons, every stage's cost, alternatives, what binds."""
        from headway.planner.explain import long  # the words are of this class

        return long(self)

    def __str__(self) -> str:
        from headway.planner.explain import short  # the words are of this class

        return short(self)


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Share `total` samples out to `parts` takers as evenly as possible, larger shares first."""
    least, more = divmod(total, parts)
    return tuple(least + 1 if part < more else least for part in range(parts))


def micro_batches(samples: int, count: int, largest: int | None = None) -> tuple[int, ...]:
    """Cut a copy's samples into `count` micro-batches of at most m = `largest`, by default ceil(samples / count).

    Sizes are m, m, ..., rest when that makes `count` of them, else they differ by at most one, larger first.
    Raises PlanError when there are fewer samples than micro-batches, or more than fit.
    """
    most = -(-samples // count) if largest is None and count > 0 else largest or 0
    if not 1 <= count <= samples or most * count < samples:
        raise PlanError(
            f"{samples} samples cannot be cut into {count} micro-batches"
            + (f" of at most {largest}" if largest is not None and 1 <= count <= samples else ""),
            place="num_micro_batches",
            remedy=f"between 1 and {samples} micro-batches, with room for every sample",
        )
    full, rest = divmod(samples, most)
    if full + (rest > 0) == count:
        return (most,) * full + ((rest,) if rest else ())
    return shares(samples, count)


def _plain(plan: Plan) -> dict[str, Any]:
    values: dict[str, Any] = {"format": FORMAT}
    tables: dict[str, Any] = {}
    for item in fields(plan):
        value = getattr(plan, item.name)
        if value is None:
            continue  # TOML has no null: what is missing is absent
        if isinstance(value, (Split, Fingerprint)):
            tables[item.name] = value.to_dict()
        elif item.name in ("stages", "messages", "runners_up"):
            tables[item.name] = [asdict(entry) for entry in value]
        else:
            values[item.name] = list(value) if isinstance(value, tuple) else value
    return values | tables


def _from_plain(values: Mapping[str, Any]) -> Plan:
    known = {item.name for item in fields(Plan)}
    unknown = sorted(set(values) - known - {"format"})
    if unknown or values.get("format", FORMAT) != FORMAT:
        what = f"unknown fields {', '.join(unknown)}" if unknown else f"format {values['format']}, not {FORMAT}"
        raise PlanError(f"the plan file has {what}", remedy=f"fields of a plan are {', '.join(sorted(known))}")
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name != "format"
    }
    if "split" in arguments:
        arguments["split"] = Split.from_dict(values["split"])
    if "made_for" in arguments:
        arguments["made_for"] = Fingerprint.from_dict(values["made_for"])
    for name, kind in (("stages", StageEstimate), ("messages", MessageEstimate), ("runners_up", RunnerUp)):
        if name in arguments:
            arguments[name] = tuple(kind(**entry) for entry in values[name])
    return Plan(**arguments)
