"""Each rule speaks when it should, with its numbers, and is silent otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.cost.cluster import Cluster, Device, Link
from headway.cost.memory import RUNTIME_BYTES_CPU
from headway.graph.model import ModelGraph
from headway.graph.record import record
from headway.planner.advise import RULES, advise
from headway.planner.plan import Plan
from headway.planner.search import search
from tests.cost.graphs import chain, times


def case(
    size: int = 2, memory: int = 1 << 30, link: Link | None = None, **fixed: object
) -> tuple[ModelGraph, Plan, Cluster]:
    device = Device("cpu", memory, 1e10, 1e10, 1e9)
    cluster = Cluster(f"{size}xcpu:1GiB", device=device, link_inside=link or Link(1e-6, 1e10))
    plan = search(lambda n: chain(n, (256,) * 9), times, cluster, global_batch=8, fixed=fixed)
    return chain(plan.micro_batch, (256,) * 9), plan, cluster


def ids(graph: ModelGraph, plan: Plan, cluster: Cluster) -> set[str]:
    return {advice.id for advice in advise(graph, plan, cluster)}


def recorded(model: nn.Module, batch: torch.Tensor) -> ModelGraph:
    return record(model, lambda net, x: net(x).square().mean(), batch)


def test_nothing_to_say_about_a_good_plan() -> None:
    assert ids(*case()) == set()


def test_idle_ranks() -> None:
    assert "idle-ranks" in ids(*case(3, data=1, pipeline=2))


def test_memory_near_the_limit() -> None:
    graph, plan, cluster = case()
    peak = max(plan.memory)
    full = replace(plan, device_memory=peak + 1)
    (advice,) = advise(graph, full, cluster)
    assert advice.id == "memory-near-limit" and f'"micro_batch": {plan.micro_batch // 2}' in advice.remedy
    assert not advise(graph, replace(plan, device_memory=2 * peak), cluster)


def test_bubble() -> None:
    graph, plan, cluster = case(4, pipeline=4, num_micro_batches=4, schedule="one_f_one_b")
    (advice,) = [advice for advice in advise(graph, plan, cluster) if advice.id == "large-bubble"]
    assert "cannot avoid 43%" in advice.reason and "at best 27%" in advice.remedy  # 3 / 7 and 3 / 11


def test_reduction() -> None:
    assert "slow-reduction" in ids(*case(2, link=Link(1e-5, 1e7), pipeline=1))


def test_memory_binds_long_sequences() -> None:
    graph, plan, cluster = case(2, RUNTIME_BYTES_CPU + (6 << 20))
    assert plan.binding.startswith("memory") and "long-sequences" not in ids(graph, plan, cluster)
    tokens = replace(graph.values[0], dtype="int64", shape=(graph.samples, 128))
    assert "long-sequences" in ids(replace(graph, values=(tokens, *graph.values[1:])), plan, cluster)


def test_batch_norm_of_few_samples() -> None:
    _, plan, cluster = case()
    graph = recorded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4))
    assert "batch-norm-small-micro-batch" in ids(graph, plan, cluster)
    assert "batch-norm-small-micro-batch" not in ids(graph, replace(plan, micro_batch=64), cluster)


class Written(nn.Module):
    """Attention, written out or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.fused = nn.Linear(8, 24), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return F.softmax(q @ k.transpose(-1, -2), -1) @ v


@pytest.mark.parametrize("fused", [False, True])
def test_attention_written_out(fused: bool) -> None:
    _, plan, cluster = case()
    graph = recorded(Written(fused), torch.randn(2, 64, 8))
    assert ("attention-written-out" in ids(graph, plan, cluster)) is not fused


def test_half_precision() -> None:
    graph, plan, _ = case()
    assert "half-precision" in ids(graph, plan, Cluster("2xH100"))


def test_unused_parameters() -> None:
    _, plan, cluster = case()
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "left": nn.Linear(4, 4)})
    graph = record(model, lambda net, x: net["used"](x).mean(), torch.randn(2, 4))
    (advice,) = [advice for advice in advise(graph, plan, cluster) if advice.id == "unused-parameters"]
    assert "2 parameters (80 B)" in advice.reason and "left.weight, left.bias" in advice.reason


def test_value_reads() -> None:
    _, plan, cluster = case()

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        return y.mean() if y.sum().item() > 0 else -y.mean()

    advice = [
        a for a in advise(record(nn.Linear(4, 4), loss, torch.randn(2, 4)), plan, cluster) if a.id == "value-reads"
    ]
    assert len(advice) == 1 and "test_advise.py:" in advice[0].reason


def test_every_rule_has_a_line_of_its_own() -> None:
    assert len({rule.__doc__ for rule in RULES}) == len(RULES)
