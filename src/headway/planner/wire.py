"""Wire: in what form gradients cross between copies, chosen where the link is what limits, with the reason in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from headway.cost.cluster import Cluster, Link
from headway.cost.model import exposed_reduce_seconds
from headway.graph.model import ModelGraph
from headway.units import format_rate, format_seconds

PARTS: Mapping[str, float] = MappingProxyType(
    {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": (512 + 4) / 2048, "int4": (64 + 4) / 512}
)
"""Bytes that each codec puts on the wire, as a part of float32's; the least lossy first."""

MENUS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"auto": ("fp32", "fp16", "bf16"), "auto8": ("fp32", "fp16", "bf16", "int8")}
)
"""From what is chosen, by measurement: 8 bits only when the user allows them."""

NEARLY = 0.05
"""A lossier codec has to save more than this part of a step."""

PASSES = 6
"""How often a codec that was not measured reads or writes each byte of a gradient, there and back."""


@dataclass(frozen=True)
class Wire:
    """A codec: `part` of float32's bytes on the wire, `work` seconds of a rank for each byte of float32."""

    codec: str
    part: float
    work: float = 0.0


ROUND_BYTES = 4 << 20
"""Float32 bytes that cross in one round of a sum with a codec."""

ROUNDS = 8
"""Rounds for which a rank keeps messages."""


EXACT = Wire("fp32", 1.0)


@dataclass(frozen=True)
class Reduction:
    """What one stage reduces: bytes of float32 and of other dtypes, between `copies` over `link`.

    `backward` are the seconds that can hide it, `tied` those of summing tied parameters over stages, `rest` those of
    the stage's step without any reduction.
    """

    coded_bytes: int
    other_bytes: int
    copies: int
    link: Link
    backward: float
    tied: float
    rest: float

    def seconds(self, wire: Wire) -> float:
        """Return the seconds that the reduction adds to the step; a codec's own work is not hidden by anything."""
        size = round(self.coded_bytes * wire.part) + self.other_bytes
        work = wire.work * self.coded_bytes if self.copies > 1 else 0.0
        return exposed_reduce_seconds(size, self.copies, self.link, self.backward) + work + self.tied

    def buffer_bytes(self, wire: Wire) -> int:
        """Return the bytes of messages that a rank keeps: pieces to and from each other rank, its sum, their sums."""
        if self.copies < 2 or wire.codec == "fp32" or not self.coded_bytes:
            return 0
        messages = (3 * (self.copies - 1) + 1) / self.copies
        return round(ROUNDS * messages * min(ROUND_BYTES, self.coded_bytes) * wire.part)


def menu(asked: str | None, work: Mapping[str, float] | None, cluster: Cluster) -> tuple[Wire, ...]:
    """Return the codecs to choose from, the least lossy first: one when the user named it.

    `work` are measured seconds by codec for each byte. Where nothing was measured, only what was asked for is there.
    """
    if asked in PARTS:
        names: tuple[str, ...] = (str(asked),)
    else:
        known = work is not None or asked == "auto8" or cluster.hosts == 1
        names = MENUS[asked or "auto"] if known else ("fp32",)
    guess = PASSES / (cluster.device.bandwidth * cluster.device.bandwidth_efficiency)
    given = work or {}
    return tuple(EXACT if name == "fp32" else Wire(name, PARTS[name], given.get(name, guess)) for name in names)


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
    link = max((r.link for r in reductions), key=lambda link: link.seconds(1 << 20))
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


def bytes_by_kind(graph: ModelGraph, names: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of trainable parameters of float32, which codecs are for, and of others; a tied one once."""
    infos = {graph.parameter[name].name: graph.parameter[name] for name in names}.values()
    trainable = [info for info in infos if info.trainable and not info.is_buffer]
    coded = sum(info.bytes for info in trainable if info.dtype == "float32")
    return coded, sum(info.bytes for info in trainable) - coded


def _named(wire: Wire, reductions: Sequence[Reduction], copies: int) -> str | None:
    if copies < 2:
        return None
    other = sum(r.other_bytes for r in reductions)
    some = "float32 gradients" if other else "gradients"
    if other and not any(r.coded_bytes for r in reductions):
        return f"gradients are reduced exactly: {wire.codec} is for float32"
    rest = ", those of other dtypes exactly" if other else ""
    return f"{some} cross as {wire.codec}, as asked: {wire.part:.0%} of the bytes of an exact reduction{rest}"
