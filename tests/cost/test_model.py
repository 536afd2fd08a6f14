"""The cost model's formulas against numbers worked out by hand."""

from __future__ import annotations

import pytest

from headway.cost.cluster import Device, Link
from headway.cost.model import (
    accumulate_seconds,
    all_reduce_seconds,
    call_seconds,
    estimate_times,
    exposed_reduce_seconds,
    roofline_seconds,
    update_seconds,
)
from tests.cost.graphs import chain

DEVICE = Device("cpu", 1 << 30, flops=1e9, flops_half=4e9, bandwidth=1e8, efficiency=0.5, gap=1e-6)


def test_roofline() -> None:
    # 1e6 FLOPs at 1e9 * 0.5 take 2 ms; 1e5 bytes at 1e8 take 1 ms
    assert roofline_seconds(1e6, 1e5, "float32", DEVICE) == pytest.approx(2e-3 + 1e-6)
    # in 16 bits the FLOPs take 0.5 ms, so the bytes decide; in 64 bits 4 ms
    assert roofline_seconds(1e6, 1e5, "bfloat16", DEVICE) == pytest.approx(1e-3 + 1e-6)
    assert roofline_seconds(1e6, 1e5, "float64", DEVICE) == pytest.approx(4e-3 + 1e-6)


def test_a_call_takes_twice_as_long_backward() -> None:
    graph = chain(samples=100, widths=(10, 1000))
    # 2 * 100 * 10 * 1000 = 2e6 FLOPs: 4 ms; bytes 2 * 4e5 = 8e5: 8 ms
    assert call_seconds(graph, graph.calls[0], DEVICE) == pytest.approx((8e-3 + 1e-6, 16e-3 + 1e-6))
    times = estimate_times(graph, DEVICE)
    assert times.forward[0] == pytest.approx(8e-3 + 1e-6) and times.estimated == 1.0
    assert times.total == pytest.approx(sum(times.forward) + sum(times.backward))


def test_what_depends_on_the_batch_alone_has_no_backward() -> None:
    graph = chain(mask=True)
    assert call_seconds(graph, graph.calls[0], DEVICE)[1] == 0.0


def test_ring_all_reduce() -> None:
    link = Link(1e-3, 1e6)
    assert all_reduce_seconds(4e6, 1, link) == 0.0
    # 4 ranks: 6 steps of 1 ms and 1 MB each at 1 MB/s
    assert all_reduce_seconds(4e6, 4, link) == pytest.approx(6 * 1e-3 + 6.0)


def brute_exposed(num_bytes: int, ranks: int, link: Link, backward: float, bucket: int) -> float:
    """Play the buckets one after the other on the link."""
    buckets = -(-num_bytes // bucket)
    each = all_reduce_seconds(num_bytes / buckets, ranks, link)
    free = 0.0
    for number in range(1, buckets + 1):
        free = max(free, backward * number / buckets) + each
    return free - backward


@pytest.mark.parametrize("backward", [0.0, 0.5, 1.9, 2.0, 5.0, 100.0])
@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 7300])
def test_exposed_reduction_is_what_a_replay_of_the_buckets_gives(backward: float, num_bytes: int) -> None:
    link = Link(0.01, 2000.0)
    expected = brute_exposed(num_bytes, 3, link, backward, 1000)
    assert exposed_reduce_seconds(num_bytes, 3, link, backward, 1000) == pytest.approx(expected)
    assert exposed_reduce_seconds(num_bytes, 1, link, backward, 1000) == 0.0


def test_update() -> None:
    # AdamW: 2 (3 + 4) + 1 = 15 passes over 1e6 bytes at 1e8 bytes/s
    assert update_seconds(10**6, 2, DEVICE) == pytest.approx(0.15)
    assert update_seconds(10**6, 0, DEVICE) == pytest.approx(0.07)


def test_adding_up_gradients_costs_nothing_for_one_micro_batch_and_three_passes_for_each_further_one() -> None:
    # 1e6 bytes at 1e8: one pass takes 10 ms; of 4 micro-batches 3 add up
    assert accumulate_seconds(10**6, 1, DEVICE) == 0.0
    assert 4 * accumulate_seconds(10**6, 4, DEVICE) == pytest.approx(3 * 3 * 10e-3)
