"""Routes: host by host where that is faster, by arithmetic done another way; buckets grow with ranks and links."""

from __future__ import annotations

import pytest

from headway.cost.cluster import Cluster, Link
from headway.cost.model import all_reduce_seconds
from headway.planner.plan import Plan
from headway.planner.route import LEAST_BUCKET, MOST_BUCKET, Route, bucket_bytes
from headway.planner.search import search
from tests.cost.graphs import chain, times

FAR, NEAR = Link(2e-4, 118e6), Link(5e-5, 2e9)


def cluster(hosts: int, each: int, near: Link = NEAR) -> Cluster:
    return Cluster.here(hosts * each, 1 << 30, num_hosts=hosts, link=near, link_between=FAR, flops=1e11, bandwidth=1e10)


def test_neighbours_are_equally_many_in_a_row() -> None:
    assert Route.of(cluster(2, 4), range(8)) == Route(8, FAR, 4, NEAR)
    assert Route.of(cluster(2, 4), [2, 3, 4, 5]) == Route(4, FAR, 2, NEAR)
    assert Route.of(cluster(2, 4), [1, 2, 3, 4]) == Route(4, FAR)  # three here, one there
    assert Route.of(cluster(2, 4), [0, 4]) == Route(2, FAR)
    assert Route.of(cluster(2, 4), [0, 1, 2, 3]) == Route(4, NEAR)
    assert Route.of(cluster(1, 4), range(4)) == Route(4, NEAR)


def test_a_host_sends_what_its_link_carries() -> None:
    """Bytes over one host's link, counted message by message, give the time of a large sum."""
    for hosts, each in ((2, 2), (2, 4), (4, 2)):
        route = Route.of(cluster(hosts, each), range(hosts * each))
        size, ranks = 1e9, hosts * each
        ring = 2 * (ranks - 1) * size / ranks  # each step one n-th leaves the last rank of a host
        each_to_each = each * (ranks - each) * 2 * size / ranks  # pieces there, sums back
        first_near = each * (hosts - 1) * 2 * size / ranks
        for coded, by_host, sent in (
            (False, False, ring), (True, False, each_to_each), (True, True, first_near), (False, True, first_near),
        ):  # fmt: skip
            inside = all_reduce_seconds(size, each, NEAR) if by_host else 0.0
            seconds = route.all_reduce_seconds(size, coded=coded, by_host=by_host)
            assert seconds == pytest.approx(sent / FAR.bandwidth + inside, rel=0.01), (hosts, each, coded, by_host)
            link = route.as_link(coded=coded, by_host=by_host)
            for count in (1e4, 1e9):
                whole = route.all_reduce_seconds(count, coded=coded, by_host=by_host)
                assert all_reduce_seconds(count, ranks, link) == pytest.approx(whole)


def test_host_by_host_only_where_it_is_faster() -> None:
    assert Route.of(cluster(2, 2), range(4)).by_host(coded=False)
    assert Route.of(cluster(2, 2), range(4)).by_host(coded=True)
    slow_inside = Route.of(cluster(2, 2, near=FAR), range(4))
    assert not slow_inside.by_host(coded=False) and not slow_inside.by_host(coded=True)
    assert not Route(4, FAR).by_host(coded=True)


def test_buckets_grow_with_ranks_and_with_what_is_on_the_way() -> None:
    sizes = [bucket_bytes(NEAR, ranks) for ranks in (2, 4, 8, 16, 1000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] < sizes[3] and sizes[4] == MOST_BUCKET
    assert bucket_bytes(FAR, 2) == LEAST_BUCKET and bucket_bytes(Link(0.0, 1e12), 64) == LEAST_BUCKET


def test_the_plan_says_so() -> None:
    def planned(hosts: int, each: int) -> Plan:
        fixed = {"data": hosts * each, "codec": "int8"}
        work = {"int8": 3e-10, "fp16": 2e-10, "bf16": 2e-10}
        return search(
            lambda n: chain(n, (1024,) * 8), times, cluster(hosts, each), global_batch=8, fixed=fixed, codec_work=work
        )

    plan = planned(2, 2)
    assert plan.neighbours == 2 and plan.bucket_bytes >= LEAST_BUCKET
    assert any("summed by the 2 ranks of each host first" in reason for reason in plan.reasons)
    assert planned(4, 1).neighbours == planned(1, 4).neighbours == 1
