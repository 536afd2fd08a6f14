"""The balancer against brute force, closed forms and the failures of others."""

from __future__ import annotations

import random
import time
from itertools import combinations
from math import inf

import numpy as np
import pytest

from headway.errors import PlanError
from headway.layout.partition import Balance, balance, least_bottleneck

GIB = 2**30


def brute_force(weights, num_stages, *, allowed, boundary, speeds, fits):
    """Give all partitions that fit, as (bottleneck, loads, sum of boundaries, cuts); the slowest and plainest way."""
    count = len(weights)
    found = []
    for cuts in combinations([i for i in range(1, count) if allowed[i]], num_stages - 1):
        ends = (0, *cuts, count)
        ranges = list(zip(ends, ends[1:], strict=False))
        if not all(fits(first, last, stage) for stage, (first, last) in enumerate(ranges)):
            continue
        loads = [
            sum(weights[first:last]) / speeds[stage]
            + (boundary[first] if first else 0)
            + (boundary[last] if last < count else 0)
            for stage, (first, last) in enumerate(ranges)
        ]
        found.append((max(loads), loads, sum(boundary[cut] for cut in cuts), cuts))
    return found


def squares(loads):
    return sum(load * load for load in loads)


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_is_better(seed: int) -> None:
    """4,000 random instances in all: whole and real numbers, zeros, forbidden cuts, speeds, memory, tied parameters."""
    draw = random.Random(seed)
    refused = 0
    for _ in range(200):
        count = draw.randint(1, 9)
        num_stages = draw.randint(1, min(count, 5))
        number = draw.choice([lambda: draw.randint(0, 4), draw.random, lambda: draw.choice([1.0, 0.1])])
        weights = [number() for _ in range(count)]
        allowed = [draw.random() < 0.8 for _ in range(count)]
        boundary = [draw.choice([0, 0, draw.random(), 1]) for _ in range(count)]
        speeds = [draw.choice([1.0, 1.0, 2.0, 0.5]) for _ in range(num_stages)]
        memory = [draw.randint(0, 5) for _ in range(count)]
        in_flight = [draw.randint(1, 4) for _ in range(num_stages)]
        tied = [draw.randint(0, 3) for _ in range(count)]  # node i holds parameter tied[i] once, of as many bytes
        limits = [draw.randint(5, 60) for _ in range(num_stages)] if draw.random() < 0.6 else [inf] * num_stages

        def static(first, last, stage, tied=tied):
            return sum(set(tied[first:last]))

        def fits(first, last, stage, kept=in_flight, memory=memory, limits=limits, static=static):
            return kept[stage] * sum(memory[first:last]) + static(first, last, stage) <= limits[stage]

        partitions = brute_force(weights, num_stages, allowed=allowed, boundary=boundary, speeds=speeds, fits=fits)
        options = {"allowed": allowed, "boundary": boundary, "speeds": speeds}
        if limits[0] < inf:
            options |= {"memory": memory, "in_flight": in_flight, "static": many(static), "limits": limits}
        if not partitions:
            refused += 1
            with pytest.raises(PlanError):
                balance(weights, num_stages, **options)
            continue
        least = min(bottleneck for bottleneck, *_ in partitions)
        result = balance(weights, num_stages, **options)
        assert result.bottleneck == pytest.approx(least, rel=1e-9, abs=1e-12)
        assert result.bound == result.bottleneck
        mine = next(partition for partition in partitions if partition[3] == result.cuts)
        assert list(result.loads) == pytest.approx(mine[1])
        best = [partition for partition in partitions if partition[0] <= least * (1 + 1e-9)]
        # Loads are compared in steps of 1/4096 of the bottleneck: a square is known to about 1/4096 of its greatest.
        step = num_stages * least * least / 4096
        assert squares(mine[1]) <= min(squares(loads) for _, loads, *_ in best) + step
        equal = [crossing for _, loads, crossing, _ in best if sorted(loads) == pytest.approx(sorted(mine[1]))]
        assert mine[2] <= min(equal) + num_stages * max(boundary) / 1000
    assert refused < 150


def many(static):
    """Give a function of one range as one of many ranges."""
    return lambda first, last, stage: np.array([static(*ends, stage) for ends in zip(first, last, strict=True)])


def test_additive_static_bytes_equal_a_function() -> None:
    draw = random.Random(1)
    for _ in range(100):
        weights = [draw.random() for _ in range(12)]
        held = [draw.randint(0, 9) for _ in weights]
        limits = [draw.randint(15, 30) for _ in range(3)]
        answers = []
        for static in (held, many(lambda first, last, _, held=held: sum(held[first:last]))):
            try:
                answers.append(balance(weights, 3, static=static, limits=limits))
            except PlanError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]


def test_a_quick_bound_is_just_below_the_best() -> None:
    draw = random.Random(3)
    refused = 0
    for _ in range(150):
        count, num_stages = draw.randint(4, 20), draw.randint(1, 4)
        options = {
            "allowed": [draw.random() < 0.8 for _ in range(count)],
            "memory": [draw.randint(0, 5) for _ in range(count)],
            "in_flight": [draw.randint(1, 4) for _ in range(num_stages)],
            "static": [draw.randint(0, 3) for _ in range(count)],
            "limits": [draw.randint(10, 90) for _ in range(num_stages)],
        }
        weights = [draw.uniform(0.1, 2) for _ in range(count)]
        if sum(options["allowed"][1:]) + 1 < num_stages:
            continue
        try:
            best = balance(weights, num_stages, **options).bottleneck
        except PlanError:
            refused += 1
            assert least_bottleneck(weights, num_stages, **options) is None
            continue
        bound = least_bottleneck(weights, num_stages, **options)
        assert bound is not None and (1 - 2e-3) * best <= bound <= best * (1 + 1e-9)
    assert 10 < refused < 100


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("seconds", [1.0, 0.1, 1 / 3])
def test_equal_layers_come_out_equal(layers: int, num_stages: int, seconds: float) -> None:
    if num_stages > layers:
        with pytest.raises(PlanError, match=f"cut into {layers} at most"):
            balance([seconds] * layers, num_stages)
        return
    result = balance([seconds] * layers, num_stages)
    ends = (0, *result.cuts, layers)
    sizes = [last - first for first, last in zip(ends, ends[1:], strict=False)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes), "the smaller stages first: they keep more micro-batches"


def test_seven_layers_on_four_stages() -> None:
    """torchgpipe's balancer gives 1, 1, 1, 4 here: a bottleneck of 4 where 2 is possible."""
    assert balance([1.0] * 7, 4) == Balance(cuts=(1, 3, 5), bottleneck=2.0, loads=(1.0, 2.0, 2.0, 2.0), bound=2.0)


def test_ties_go_to_the_smaller_boundary() -> None:
    """The boundaries are far below the step in which loads are compared, and decide all the same."""
    assert balance([9000, 4000, 0, 0, 4000], 3, boundary=[0, 0.03, 0.03, 0.01, 0.02]).cuts == (1, 3)
    assert balance([9000, 4000, 0, 0, 4000], 3, boundary=[0, 0.03, 0.01, 0.03, 0.02]).cuts == (1, 2)


def test_a_boundary_weighs_on_both_neighbours() -> None:
    result = balance([1, 1, 1, 1], 2, boundary=[9, 0, 5, 0])
    assert (result.cuts, result.loads) == ((1,), (1.0, 3.0))
    assert balance([1, 1, 1, 1], 3, boundary=[9, 0.25, 5, 0.5]).loads == (1.25, 2.75, 1.5)


def test_a_faster_stage_takes_more() -> None:
    assert balance([1.0] * 6, 2, speeds=[2, 1]).cuts == (4,)


def test_stages_early_in_1f1b_hold_less() -> None:
    """Stage 0 of two keeps two micro-batches: with room for 4 node activations each, it can hold 2 nodes only."""
    result = balance([1.0] * 6, 2, memory=[1] * 6, in_flight=[2, 1], limits=[4, 4])
    assert result.cuts == (2,)


def test_refusals_name_the_node() -> None:
    with pytest.raises(PlanError, match="node 2 does not fit on any stage: it needs 3 GiB") as caught:
        balance([1.0] * 4, 2, static=[GIB, GIB, 3 * GIB, GIB], limits=[2 * GIB] * 2)
    assert "2 GiB, of stage 0" in str(caught.value)
    with pytest.raises(PlanError, match=r"nodes 1\.\.2 does not fit on any stage"):
        balance([1.0] * 4, 2, static=[1, 2, 3, 1], limits=[4, 4], allowed=[True, True, False, True])
    with pytest.raises(PlanError, match="2 stages are too small for the model: node 4 is beyond them"):
        balance([1.0] * 6, 2, static=[1] * 6, limits=[2, 2])
    with pytest.raises(PlanError, match="stage 0 is left with nothing that fits.* before node 0 at the latest"):
        balance([1.0] * 3, 2, static=[2, 1, 1], limits=[1, 4])
    with pytest.raises(PlanError, match="3 stages are asked for, and the model can be cut into 2 at most"):
        balance([1.0] * 4, 3, allowed=[True, False, True, False])


@pytest.mark.parametrize(
    "arguments",
    [
        {"weights": [], "num_stages": 1},
        {"weights": [1.0], "num_stages": 0},
        {"weights": [1.0, -1.0], "num_stages": 1},
        {"weights": [1.0, inf], "num_stages": 1},
        {"weights": [1.0, 1.0], "num_stages": 1, "boundary": [0.0]},
        {"weights": [1.0, 1.0], "num_stages": 2, "limits": [1.0]},
        {"weights": [1.0, 1.0], "num_stages": 2, "speeds": [1.0, 0.0]},
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments) -> None:
    with pytest.raises(ValueError):
        balance(**arguments)


def test_two_thousand_nodes_on_sixteen_stages_take_about_a_second() -> None:
    draw = random.Random(0)
    weights = [draw.random() for _ in range(2000)]
    boundary = [draw.random() for _ in weights]
    limits = [sum(weights)] * 16
    start = time.process_time()
    result = balance(
        weights, 16, boundary=boundary, memory=weights, in_flight=[16 - stage for stage in range(16)], limits=limits
    )
    assert time.process_time() - start < 2
    assert result.bound == result.bottleneck
