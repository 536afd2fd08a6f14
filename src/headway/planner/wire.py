"""Wire: in what form gradients cross between copies, chosen where the link is what limits, with the reason in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from headway.cost.cluster import Cluster, Link
from headway.cost.model import all_reduce_seconds, exposed_reduce_seconds
from headway.graph.model import ModelGraph
from headway.planner.route import Route, bucket_bytes
from headway.units import format_rate, format_seconds

PARTS: Mapping[str, float] = MappingProxyType(
    {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": (512 + 4) / 2048, "int4": (64 + 4) / 512}
)
"""Bytes that each codec puts on the wire, as a part of float32's; the least lossy first."""

MENUS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"auto": ("fp32", "fp16", "bf16"), "auto8": ("fp32", "fp16", "bf16", "int8")}
)
"""From what is chosen, by measurement: 8 bits only when the user allows them."""

LOW_RANK, DEFAULT_RANK = "powersgd", 4
"""The codec that sends factors of matrices: "powersgd", or "powersgd:8" for another rank than 4."""

FEEDBACK = ("int4", LOW_RANK)
"""Codecs that keep what they lose and add it to the next gradient: a rank has it in float32."""

NEARLY = 0.05
"""A lossier codec has to save more than this part of a step."""

PASSES = 6
"""How often a codec that was not measured reads or writes each byte of a gradient, there and back."""


@dataclass(frozen=True)
class Wire:
    """A codec: `part` of float32's bytes on the wire, `work` seconds of a rank for each byte of float32.

    With a `rank`, the part depends on the shapes of the parameters.
    """

    codec: str
    part: float
    work: float = 0.0
    rank: int | None = None

    @property
    def keeps(self) -> bool:
        """Whether a rank keeps what this codec loses."""
        return self.codec.partition(":")[0] in FEEDBACK


ROUND_BYTES = 4 << 20
"""Float32 bytes that cross in one round of a sum with a codec."""

ROUNDS = 8
"""Rounds for which a rank keeps messages."""


EXACT = Wire("fp32", 1.0)


@dataclass(frozen=True)
class Reduction:
    """What one stage reduces: bytes of float32 and of other dtypes, between its copies over `route`.

    `backward` are the seconds that can hide it, `tied` those of summing tied parameters over stages, `rest` those of
    the stage's step without any reduction. `shapes` are those of the float32 parameters. With
    `sync_every` above 1 parameters are reduced instead, once in so many steps.
    """

    coded_bytes: int
    other_bytes: int
    route: Route
    backward: float
    tied: float
    rest: float
    shapes: tuple[tuple[int, ...], ...] = ()
    sync_every: int = 1

    @property
    def copies(self) -> int:
        """How many ranks reduce."""
        return self.route.ranks

    def by_host(self, wire: Wire) -> bool:
        """Tell whether sums are made within each host first."""
        return wire.rank is None and self.route.by_host(coded=wire.codec != "fp32")

    def bucket_bytes(self, wire: Wire) -> int:
        """Return the size of buckets."""
        return bucket_bytes(self._link(wire), self.copies)

    def _link(self, wire: Wire) -> Link:
        return self.route.as_link(coded=wire.codec != "fp32", by_host=self.by_host(wire))

    def part(self, wire: Wire) -> float:
        """Return how many of float32's bytes a codec puts on the wire, as a part."""
        if wire.rank is None or not self.coded_bytes:
            return wire.part
        return sum(4 * low_rank_count(shape, wire.rank) for shape in self.shapes) / self.coded_bytes

    def seconds(self, wire: Wire) -> float:
        """Return the seconds that the reduction adds to the step; a codec's own work is not hidden by anything."""
        size = round(self.coded_bytes * self.part(wire)) + self.other_bytes
        work = wire.work * self.coded_bytes if self.copies > 1 else 0.0
        link = self._link(wire)
        if self.sync_every > 1:  # of parameters, after a round, with nothing to hide behind
            return (all_reduce_seconds(size, self.copies, link) + work) / self.sync_every + self.tied
        bucket = bucket_bytes(link, self.copies)
        return exposed_reduce_seconds(size, self.copies, link, self.backward, bucket) + work + self.tied

    def buffer_bytes(self, wire: Wire) -> int:
        """Return the bytes that a rank keeps: messages to and from each other rank, sums, and what a codec lost."""
        # A round keeps where it began, the momentum, and in the end the change.
        round_bytes = 3 * (self.coded_bytes + self.other_bytes) if self.sync_every > 1 and self.copies > 1 else 0
        if self.copies < 2 or wire.codec == "fp32" or not self.coded_bytes:
            return round_bytes
        messages = (3 * (self.copies - 1) + 1) / self.copies
        kept = self.coded_bytes if wire.keeps else 0
        return round_bytes + kept + round(ROUNDS * messages * min(ROUND_BYTES, self.coded_bytes) * self.part(wire))


def menu(asked: str | None, work: Mapping[str, float] | None, cluster: Cluster) -> tuple[Wire, ...]:
    """Return the codecs to choose from, the least lossy first: one when the user named it.

    `work` are measured seconds by codec for each byte. Where nothing was measured, only what was asked for is there.
    """
    rank = low_rank(asked or "")
    if asked in PARTS or rank is not None:
        names: tuple[str, ...] = (str(asked),)
    else:
        known = work is not None or asked == "auto8" or cluster.hosts == 1
        names = MENUS[asked or "auto"] if known else ("fp32",)
    guess = PASSES / (cluster.device.bandwidth * cluster.device.bandwidth_efficiency)
    given = work or {}
    return tuple(
        EXACT if name == "fp32" else Wire(name, PARTS.get(name, 1.0), given.get(name, guess), rank) for name in names
    )


def pick(wires: Sequence[Wire], reductions: Sequence[Reduction], apart: bool) -> tuple[Wire, str | None]:
    """Choose the least lossy codec whose step is within 5 % of the fastest, and say why.

    `apart`: copies are on different hosts; on one host the choice is always exact, unless the user named a codec.
    """
    copies = max(reduction.copies for reduction in reductions)
    first = wires[0]
    if len(wires) == 1:
        return first, None if first.codec == "fp32" else _named(first, reductions, copies)
    if copies < 2:
        return first, None
    if not apart:
        return first, "gradients stay exact (fp32): the copies are on one host"
    steps = {wire: max(r.rest + r.seconds(wire) for r in reductions) for wire in wires}
    chosen = next(wire for wire in wires if steps[wire] <= (1 + NEARLY) * min(steps.values()))
    link = max((r.route.link for r in reductions), key=lambda link: link.seconds(1 << 20))
    over = f"over a link of {format_rate(link.bandwidth)}"
    if chosen is first:
        other = min(wires[1:], key=lambda wire: steps[wire])
        return first, (
            f"gradients stay exact (fp32): {over} a step takes {format_seconds(steps[first])}, "
            f"with {other.codec} {format_seconds(steps[other])}"
        )
    exposed = {wire: max(r.seconds(wire) for r in reductions) for wire in (first, chosen)}
    return chosen, (
        f"gradients cross as {chosen.codec}: {over} backward leaves {format_seconds(exposed[first])} of an exact "
        f"reduction unhidden, {format_seconds(exposed[chosen])} of this one"
    )


def low_rank(codec: str) -> int | None:
    """Return the rank of "powersgd" (4) and "powersgd:RANK"; None for what is neither."""
    name, colon, rank = codec.partition(":")
    if name != LOW_RANK or (colon and not (rank.isdecimal() and int(rank) > 0)):
        return None
    return int(rank) if colon else DEFAULT_RANK


def factors(shape: tuple[int, ...], rank: int) -> tuple[int, int, int] | None:
    """Return (rows, columns, rank) of the matrix that a parameter is sent as factors of; None: it is sent as it is.

    Rows are dim 0, columns all others. Factors have to be at most half as large.
    """
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], prod(shape[1:])
    rank = min(rank, rows, columns)
    return (rows, columns, rank) if 2 * rank * (rows + columns) <= rows * columns else None


def low_rank_count(shape: tuple[int, ...], rank: int) -> int:
    """Return how many values cross for a parameter under "powersgd:rank"."""
    found = factors(shape, rank)
    return prod(shape) if found is None else found[2] * (found[0] + found[1])


def float32_shapes(graph: ModelGraph, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the trainable parameters of float32; a tied one once."""
    infos = {graph.parameter[name].name: graph.parameter[name] for name in names}.values()
    return tuple(info.shape for info in infos if info.trainable and not info.is_buffer and info.dtype == "float32")


def bytes_by_kind(graph: ModelGraph, names: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of trainable parameters of float32, which codecs are for, and of others; a tied one once."""
    infos = {graph.parameter[name].name: graph.parameter[name] for name in names}.values()
    trainable = [info for info in infos if info.trainable and not info.is_buffer]
    coded = sum(info.bytes for info in trainable if info.dtype == "float32")
    return coded, sum(info.bytes for info in trainable) - coded


def neighbours(wire: Wire, reductions: Sequence[Reduction]) -> int:
    """Return how many ranks of a host sum among themselves first, 1 for none; the same for all stages."""
    ways = {r.route.neighbours if r.by_host(wire) else 1 for r in reductions}
    return ways.pop() if len(ways) == 1 else 1


def _named(wire: Wire, reductions: Sequence[Reduction], copies: int) -> str | None:
    if copies < 2:
        return None
    other = sum(r.other_bytes for r in reductions)
    some = "float32 gradients" if other else "gradients"
    if other and not any(r.coded_bytes for r in reductions):
        return f"gradients are reduced exactly: {wire.codec} is for float32"
    rest = ", those of other dtypes exactly" if other else ""
    part = max(r.part(wire) for r in reductions)
    later = "; what that leaves out is added to the next gradients" if wire.keeps else ""
    return f"{some} cross as {wire.codec}, as asked: {part:.0%} of the bytes of an exact reduction{rest}{later}"
