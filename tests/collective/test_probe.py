"""What the probe measures is plausible, and agreed on."""

from __future__ import annotations

import math

from headway.collective.probe import measure_codecs, measure_link
from headway.collective.world import World
from tests.several.ranks import on_ranks


def probe(world: World) -> tuple[float, float]:
    return measure_link(world, range(world.size))


def test_measures_agree_and_are_plausible() -> None:
    answers = on_ranks(3, probe)
    assert len(set(answers)) == 1
    latency, bandwidth = answers[0]
    assert 1e-6 < latency < 0.5
    assert 1e6 < bandwidth < 1e12


def test_alone() -> None:
    assert measure_link(World(), [0]) == (0.0, math.inf)


def test_codecs_are_measured_and_agreed_on() -> None:
    answers = on_ranks(2, measure_codecs)
    assert answers[0] == answers[1] and set(answers[0]) == {"fp16", "bf16", "int8", "int4"}
    assert all(1e-12 < seconds < 1e-7 for seconds in answers[0].values())
