"""Costs: what the actions of each stage cost, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.schedule.action import Edge, Kind, Schedule

_BY_STAGE = ("forward", "backward", "input", "weight", "reduce", "static_bytes", "activation_bytes", "temporary_bytes")


@dataclass(frozen=True)
class Costs:
    """What actions cost: seconds and bytes, indexed by stage, for one micro-batch; what is left out is zero.

    `input` and `weight` are the seconds of I and W; unless given, half of `backward` each.
    `message[source stage, target stage]` is the seconds from the start of a send until all has arrived, latency
    included; a gradient goes the other way and costs `message[target, source]`, or when that is absent the same.
    `boundary_bytes` has the same keys and the same rule.
    `overlap` says that a rank computes while what it sent is on its way; otherwise it waits until all has arrived.
    `links[sending rank, receiving rank]` names the link through which a pair of ranks sends, one message at a time;
    pairs that name the same share it. A pair that is not there has a link of its own.
    `reduce` is what a stage's REDUCE adds to the step (its exposed seconds). `gap` is the seconds that a rank spends
    before each computation and reduction without computing.
    `static_bytes` stay for the whole step; `activation_bytes` are held from the start of F to the end of B (of W where
    split); `temporary_bytes` while an action of the stage runs.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...] = ()
    input: tuple[float, ...] | None = None
    weight: tuple[float, ...] | None = None
    message: Mapping[Edge, float] = field(default_factory=dict)
    reduce: tuple[float, ...] = ()
    static_bytes: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    boundary_bytes: Mapping[Edge, int] = field(default_factory=dict)
    temporary_bytes: tuple[int, ...] = ()
    gap: float = 0.0
    overlap: bool = True
    links: Mapping[Edge, str] = field(default_factory=dict)

    def check(self, schedule: Schedule) -> None:
        """Raise ValueError when these are the costs of another number of stages."""
        for name in _BY_STAGE:
            given = getattr(self, name) or ()
            needed = name == "forward" or (name == "backward" and schedule.trains)
            if (given or needed) and len(given) != schedule.num_stages:
                expected = schedule.num_stages
                raise ValueError(f"Costs.{name} has {len(given)} stages, schedule {schedule.name!r} {expected}")

    def seconds(self, kind: Kind) -> tuple[float, ...]:
        """Give the seconds of an action of this kind for each stage; messages have none of their own."""
        if kind is Kind.F:
            return self.forward
        if kind is Kind.B:
            return self.backward
        if kind is Kind.REDUCE:
            return self.reduce or (0.0,) * len(self.forward)
        given = {Kind.I: self.input, Kind.W: self.weight}.get(kind, ())
        return tuple(half / 2 for half in self.backward) if given is None else given

    def transfer(self, source: int, target: int) -> float:
        """Give the seconds of a message between two stages."""
        return self.message.get((source, target), self.message.get((target, source), 0.0))

    def boundary(self, source: int, target: int) -> int:
        """Give the bytes of a message between two stages."""
        return self.boundary_bytes.get((source, target), self.boundary_bytes.get((target, source), 0))
