"""sync_every in a plan: priced, said plainly, refused where it makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.cost.cluster import Cluster, Link
from headway.errors import PlanError
from headway.planner.plan import Plan
from headway.planner.search import search
from tests.cost.graphs import chain, times

SLOW = Link(1e-3, 12e6)


def planned(size: int = 2, **fixed: Any) -> Plan:
    hosts = size if size > 1 else 1
    cluster = Cluster.here(size, 1 << 30, num_hosts=hosts, link=SLOW, link_between=SLOW, flops=1e11, bandwidth=1e10)
    return search(lambda n: chain(n, (1024,) * 8), times, cluster, global_batch=4, fixed={"codec": "fp32", **fixed})


def test_fewer_syncs_cost_less_and_are_told(tmp_path: Path) -> None:
    every_step, seldom = planned(data=2), planned(sync_every=10)
    assert (every_step.sync_every, seldom.sync_every, seldom.data) == (1, 10, 2)
    assert every_step.seconds is not None and seldom.seconds is not None
    # 32 MB over 12 MB/s take 2.8 s: a tenth of it each step. What a round keeps: start, momentum, change.
    assert 2.0 < every_step.seconds - seldom.seconds < 2.8
    parameters = 7 * 1024 * 1024 * 4
    assert seldom.memory[0] - every_step.memory[0] == pytest.approx(3 * parameters, rel=0.2)
    assert "sync_every=10" in seldom.explain() and "not the training of one process" in str(seldom)
    assert "not the training of one process" not in every_step.explain()
    seldom.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == seldom


def test_copies_are_needed() -> None:
    with pytest.raises(PlanError, match="sync_every=4 is for several copies"):
        planned(data=1, sync_every=4)
    with pytest.raises(PlanError, match="sync_every=4 is for several copies"):
        planned(size=1, sync_every=4)
    with pytest.raises(PlanError, match="not a whole number from 1 up"):
        planned(sync_every=0)
    assert planned(sync_every=1).sync_every == 1
