"""Graphs that are worked out from others, against recordings of them; and sizes at which a model goes another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.cost.cluster import Cluster
from headway.cost.model import estimate_times
from headway.graph.model import ModelGraph
from headway.graph.record import record
from headway.planner.between import Between, alike
from headway.planner.fingerprint import fingerprint
from headway.planner.plan import micro_batches, shares
from headway.planner.search import search
from headway.planner.sizes import Programs


class Attention(nn.Module):
    """A block with views whose sizes depend on the samples, a mask of the batch, and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.project = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n, length = tokens.shape
        x = self.table(tokens)
        q, k, v = self.project(x).view(n, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = (tokens > 2)[:, None, None, :].expand(n, 2, length, length)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e9).softmax(-1)
        x = self.norm(x + (scores @ v).transpose(1, 2).reshape(n, length, 8))
        return x.flatten(0, 1) @ self.table.weight.t()


class Convolution(nn.Module):
    """Batch norm and dropout, which draw and keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


class Loop(nn.Module):
    """As many calls as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) for row in rows])


class Pairs(nn.Module):
    """Every sample beside every other: what it makes grows with their square."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) @ rows.t()


class Switch(nn.Module):
    """Goes another way for some numbers of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.other = range(6, 9)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows.tanh() if len(rows) in self.other else rows


def tokens(samples: int) -> torch.Tensor:
    return torch.arange(samples * 6).view(samples, 6) % 10


def images(samples: int) -> torch.Tensor:
    return torch.ones(samples, 3, 8, 8)


def rows(samples: int) -> torch.Tensor:
    return torch.ones(samples, 4)


def recorder(model: nn.Module, batch):
    def graph_at(samples: int) -> ModelGraph:
        return record(model, lambda m, b: m(b).float().mean(), batch(samples), samples=samples)

    return graph_at


@pytest.mark.parametrize(("model", "batch"), [(Attention(), tokens), (Convolution(), images)], ids=("text", "image"))
@pytest.mark.parametrize("compute", (False, True))
def test_a_graph_between_is_the_one_that_is_recorded(model: nn.Module, batch, compute: bool) -> None:
    graph_at = recorder(model if compute else model.to("meta"), batch)
    found = Between.of([graph_at(samples) for samples in (2, 5, 16)])
    assert found is not None
    for samples in (3, 4, 7, 11):
        recorded = graph_at(samples)
        assert alike(found.at(samples), recorded)
        assert found.at(samples) == recorded
    assert not alike(found.at(4), graph_at(5))
    with pytest.raises(ValueError, match="17 samples"):
        found.at(17)


@pytest.mark.parametrize("model", (Loop(), Pairs()), ids=("a call for each sample", "the square of the samples"))
def test_other_growth_is_not_worked_out(model: nn.Module) -> None:
    graph_at = recorder(model, rows)
    assert Between.of([graph_at(samples) for samples in (2, 5, 16)]) is None


def test_two_sizes_are_no_line() -> None:
    graph_at = recorder(Attention(), tokens)
    assert Between.of([graph_at(samples) for samples in (2, 5, 5)]) is None


def test_few_of_many_sizes_are_recorded() -> None:
    asked: list[int] = []
    recorded = recorder(Attention(), tokens)

    def graph_at(samples: int) -> ModelGraph:
        asked.append(samples)
        return recorded(samples)

    cluster = Cluster("2xH100")
    programs = Programs(graph_at, lambda graph: estimate_times(graph, cluster.device))
    programs.expect(range(2, 15))
    assert programs.refused(range(2, 15)) is None and len(asked) == 3
    assert all(alike(programs.graph(samples), recorded(samples)) for samples in range(2, 15))
    assert programs.confirm((4, 7)) and len(asked) == 5


def test_a_size_at_which_the_model_goes_another_way_is_found_out() -> None:
    cluster = Cluster("2xcpu:1GiB")
    graph_at = recorder(Switch(), rows)
    programs = Programs(graph_at, lambda graph: estimate_times(graph, cluster.device))
    programs.expect(range(1, 17))
    assert len(programs.graph(7).calls) == len(programs.graph(5).calls)  # as it was thought to be
    assert programs.confirm((2, 9))
    assert not programs.confirm((7, 9))
    assert len(programs.graph(7).calls) == len(programs.graph(5).calls) + 1


def test_a_plan_is_for_the_program_of_its_own_size() -> None:
    """It goes another way at 16 samples, which is what a copy takes, and not at 1, 6 and 32, which are recorded."""
    cluster, model = Cluster("2xcpu:1GiB"), Switch()
    model.other = range(16, 17)
    graph_at = recorder(model, rows)
    plan = search(graph_at, lambda graph: estimate_times(graph, cluster.device), cluster, global_batch=32)
    assert (plan.data, plan.micro_batch) == (2, 16)
    assert plan.made_for == fingerprint(graph_at(16), cluster) != fingerprint(graph_at(32), cluster)


def test_sizes_that_the_model_refuses_are_left_out_though_many_are_worked_out() -> None:
    recorded = recorder(Convolution(), images)

    def graph_at(samples: int) -> ModelGraph:
        if samples in (1, 12):
            raise ValueError(f"{samples} samples are not for this model")
        return recorded(samples)

    cluster = Cluster("4xcpu:1GiB")
    plan = search(graph_at, lambda graph: estimate_times(graph, cluster.device), cluster, global_batch=24)
    for share in shares(plan.global_batch, plan.data):
        assert not {1, 12} & {*micro_batches(share, plan.num_micro_batches, plan.micro_batch)}
