"""Cluster: what a line of text means, and what is refused."""

from __future__ import annotations

import pytest

from headway.cost.cluster import Cluster, Link
from headway.errors import PlanError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "hosts", "devices", "kind", "memory"),
    [
        ("4xcpu:512MiB", 1, 4, "cpu", 512 << 20),
        ("2x8xH100", 2, 8, "H100", 80 * GIB),
        ("8xA100-80GB:40GiB", 1, 8, "A100-80GB", 40 * GIB),
        ("8xa100", 1, 8, "A100-80GB", 80 * GIB),
        ("V100-16GB", 1, 1, "V100-16GB", 16 * GIB),
        ("3x1xcpu:1.5 GiB", 3, 1, "cpu", 3 * GIB // 2),
    ],
)
def test_text(text: str, hosts: int, devices: int, kind: str, memory: int) -> None:
    cluster = Cluster(text)
    assert (cluster.hosts, cluster.devices_per_host, cluster.device.kind) == (hosts, devices, kind)
    assert cluster.device.memory_bytes == memory
    assert cluster.size == hosts * devices
    assert Cluster(cluster.text) == cluster
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "does not name a cluster"),
        ("8", "does not name a cluster"),
        ("2x2x2xcpu", "does not name a cluster"),
        ("-1xcpu", "does not name a cluster"),
        ("0xcpu", "at least one device"),
        ("4xTPU", "no device called 'TPU'"),
        ("4xcpu:much", "'much' is not an amount of memory"),
        ("4xcpu:512", "512 B of memory is less"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(text: str, part: str) -> None:
    with pytest.raises(PlanError) as caught:
        Cluster(text)
    assert part in caught.value.fact
    assert caught.value.place and caught.value.remedy


def test_every_preset_is_complete_and_newer_devices_are_faster() -> None:
    kinds = ("V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "cpu:1GiB")
    devices = [Cluster(kind).device for kind in kinds]
    for device in devices:
        assert device.source and device.memory_bytes > 0
        assert device.rate("bfloat16") >= device.rate("float32") > device.rate("float64") > 0
        assert 0 < device.efficiency <= 1 and 0 < device.bandwidth_efficiency <= 1
    gpus = [device for device in devices if not device.is_cpu]
    assert [d.flops_half for d in gpus] == sorted(d.flops_half for d in gpus)
    assert [d.bandwidth for d in gpus] == sorted(d.bandwidth for d in gpus)


def test_links_follow_hosts() -> None:
    cluster = Cluster("2x4xcpu:1GiB", link_between=Link(1e-3, 1e8))
    assert cluster.link((0, 3)) == cluster.link_inside
    assert cluster.link((3, 4)) == Link(1e-3, 1e8)
    assert cluster.link((0, 1, 7)) == Link(1e-3, 1e8)
    assert Link(1e-3, 1e8).seconds(1e8) == pytest.approx(1.001)


def test_this_machine() -> None:
    shared = Cluster.here(2)
    assert shared.size == 2 and shared.hosts == 1
    assert shared.device.memory_bytes >= Cluster.here(4).device.memory_bytes
    limited = Cluster.here(3, 512 << 20, link=Link(4e-5, 1e9), flops=8e10, bandwidth=1e10)
    assert limited.device.memory_bytes == 512 << 20
    assert limited.device.rate("float32") * limited.device.efficiency == 8e10
    assert limited.describe() == "3 cpu processes on 1 host, 512 MiB each, links 1 GB/s, 40 us (measured)"
    assert Cluster.here(4, 1 << 30, num_hosts=2).hosts == 2
    with pytest.raises(ValueError, match="3 processes cannot be shared equally by 2 hosts"):
        Cluster.here(3, num_hosts=2)
