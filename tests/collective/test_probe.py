"""What the probe measures is plausible, agreed on, and soon known."""

from __future__ import annotations

import math
import time

from headway.collective.probe import measure_all_reduce, measure_codecs, measure_link
from headway.collective.world import World
from tests.several.ranks import on_ranks


def probe(world: World) -> tuple[float, float, float, float]:
    measure_all_reduce(world)
    started = time.monotonic()
    latency, bandwidth = measure_link(world, range(world.size))
    rate = measure_all_reduce(world)
    return latency, bandwidth, rate, time.monotonic() - started


def test_measures_agree_and_are_plausible() -> None:
    answers = on_ranks(3, probe)
    assert len({answer[:3] for answer in answers}) == 1
    latency, bandwidth, rate, seconds = answers[0]
    assert 1e-6 < latency < 0.5
    assert 1e6 < bandwidth < 1e12 and 1e6 < rate < 1e12
    assert seconds < 5.0  # 0.5 on a machine with nothing else to do


def test_alone() -> None:
    world = World()
    assert measure_link(world, [0]) == (0.0, math.inf)
    assert measure_all_reduce(world) == math.inf


def test_codecs_are_measured_and_agreed_on() -> None:
    answers = on_ranks(2, measure_codecs)
    assert answers[0] == answers[1] and set(answers[0]) == {"fp16", "bf16", "int8", "int4"}
    assert all(1e-12 < seconds < 1e-7 for seconds in answers[0].values())
