"""Field against pricing every candidate: the same best, the same runners-up, the same that binds; bounds hold."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from headway.cost.cluster import Cluster, Device, Link
from headway.cost.memory import RUNTIME_BYTES_CPU
from headway.planner.bound import least_bytes, least_seconds, least_step, most_bytes
from headway.planner.choice import Choice, Setting
from headway.planner.cuts import cut_and_price
from headway.planner.field import Field, choose, runners_up, simplest
from headway.planner.fixed import Fixed
from headway.planner.price import Priced, estimates, price
from headway.planner.program import Program
from headway.planner.reasons import binding, nothing_fits, reasons
from headway.planner.search import filled
from headway.planner.sizes import Programs
from headway.schedule.catalogue import CATALOGUE
from headway.units import format_bytes, format_seconds
from tests.cost.graphs import chain, times


def random_field(seed: int) -> Field:
    """Make the candidates for a random chain on a random machine, from very little memory to plenty."""
    rng = random.Random(seed)
    widths = [rng.choice((16, 64, 200)) for _ in range(rng.randint(3, 6))]
    tied = rng.random() < 0.3 and len(widths) > 4
    if tied:
        widths[-2:] = widths[:2]
    seconds = [rng.uniform(1e-4, 3e-3) for _ in range(len(widths))]
    each = rng.choice((0.0, 1e-3))
    size = rng.choice((1, 2, 3, 4, 6))
    shape = rng.choice((f"{size}xcpu", f"2x{size // 2}xcpu")) if size % 2 == 0 else f"{size}xcpu"
    cluster = Cluster(
        f"{shape}:1GiB",
        device=Device("cpu", RUNTIME_BYTES_CPU + int(10 ** rng.uniform(5.2, 6.8)), 1e10, 1e10, 1e9),
        link_inside=Link(10 ** rng.uniform(-6, -3), 10 ** rng.uniform(6, 10)),
        link_between=Link(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(6, 9)),
    )
    programs = Programs(lambda n: chain(n, widths, tied=tied), lambda graph: times(graph, seconds, each))
    batch = rng.randint(4, 8)
    fixed = Fixed(shard=rng.choice((None, "none")))
    return filled(programs, Setting(cluster, batch, 2), fixed, len(programs.any_graph(batch).cuts) + 1, slices=True)


def price_each(field: Field) -> list[Priced]:
    return [cut_and_price(e.program, e.choice, field.setting, e.cuts) for e in field.entries]


def near_and_simplest(every: list[Priced], memory: int) -> Priced | None:
    fitting = [one for one in every if one.peak <= memory]
    least = min((one.seconds for one in fitting), default=0.0)
    return min((one for one in fitting if one.seconds <= 1.01 * least), key=simplest, default=None)


def best_of_families(every: list[Priced], best: Priced, memory: int) -> list[Priced]:
    families: dict[object, list[Priced]] = {}
    for one in every:
        if one.choice.family != best.choice.family:
            families.setdefault(one.choice.family, []).append(one)
    found = [near_and_simplest(f, memory) or min(f, key=lambda one: one.peak) for f in families.values()]
    return sorted(found, key=lambda one: (one.peak > memory, one.seconds if one.peak <= memory else one.peak))[:3]


@pytest.mark.parametrize("seed", range(45))
def test_the_answer_is_that_of_pricing_every_candidate(seed: int) -> None:
    field = random_field(seed)
    memory, best = field.memory, choose(field)
    priced_for_best = field.num_priced
    every = price_each(random_field(seed))
    assert [one.choice for one in every] == field.choices
    expected = near_and_simplest(every, memory)
    if best is None or expected is None:
        assert best == expected
        least = min(one.peak for one in every)
        assert f"needs {format_bytes(least)}" in nothing_fits(field).fact
        return
    assert best == expected
    others = runners_up(field, best, 3)
    assert others == best_of_families(every, best, memory)
    faster = [one for one in every if one.peak > memory and one.seconds < 0.99 * best.seconds]
    text = binding(best, field)
    assert text.startswith("memory") == bool(faster)
    if faster:
        assert format_seconds(min(one.seconds for one in faster)) in text
    program = next(entry.program for entry in field.entries if entry.choice == best.choice)
    against = next((line for line in reasons(best, field, program) if "would take" in line and "a step" in line), "")
    kinds = [one for one in every if one.peak <= memory and (one.choice.pipeline > 1) != (best.choice.pipeline > 1)]
    if kinds and "share" not in against:
        assert format_seconds(min(one.seconds for one in kinds)) in against
    assert priced_for_best <= len(every)


def test_few_candidates_are_priced() -> None:
    tried = priced = 0
    for seed in range(20):
        field = random_field(seed)
        choose(field)
        tried, priced = tried + len(field.entries), priced + field.num_priced
    assert priced < tried / 3


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_for_all_cuts_and_orders(seed: int) -> None:
    rng = random.Random(seed)
    graph = chain(2, [rng.choice((16, 64, 200)) for _ in range(7)])
    program = Program.of(graph, times(graph, [rng.uniform(1e-4, 3e-3) for _ in graph.calls]))
    names = [cut.name for cut in graph.cuts]
    device = Device("cpu", 1 << 40, 1e10, 1e10, 1e9)
    link = Link(10 ** rng.uniform(-6, -3), 10 ** rng.uniform(6, 10))
    for schedule, entry in CATALOGUE.items():
        for pipeline, chunks in ((2, entry.least), (3, entry.least), (2, 3)):
            if not entry.allows(chunks) or pipeline * chunks > 6:
                continue
            data, count = rng.choice((1, 2)), rng.choice((1, 2, 5, 8))
            choice = Choice(data, pipeline, schedule, 2, count, chunks)
            cluster = Cluster(f"{data * pipeline}xcpu:1GiB", device=device, link_inside=link)
            setting = Setting(cluster, 2 * count * data, 2)
            for cuts in combinations(names, choice.num_stages - 1):
                found = price(program, choice, cuts, setting)
                (estimate,) = estimates(program, choice, cuts, setting)
                assert least_seconds(program, choice, setting) <= found.seconds
                assert least_step(estimate) <= found.seconds
                assert least_bytes(program, choice, setting) <= found.peak
                assert least_bytes(program, choice, setting, min(choice.order.in_flight_together)) <= found.peak
                assert found.peak <= most_bytes(estimate, choice.order.in_flight)
