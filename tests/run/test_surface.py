"""A model under a plan as the nn.Module that it still is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)
        self.width = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


@pytest.fixture
def parallel() -> ParallelModel:
    model = Net()
    plan = headway.plan(model, loss, (torch.ones(4, 3),))
    return ParallelModel(model, loss, plan, World())


def test_names_modules_and_modes_are_those_of_the_model(parallel: ParallelModel) -> None:
    model = parallel.module
    for kind in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert dict(getattr(parallel, kind)()) == dict(getattr(model, kind)())
    assert set(parallel.modules()) == set(model.modules()) and list(parallel.children()) == list(model.children())
    assert not parallel.eval().training and not model.norm.training
    assert parallel.train().training and model.norm.training
    text = repr(parallel)
    assert "1 copy of the whole model" in text and "6 of 6 parameters" in text and "(blocks): ModuleList(" in text


def test_gradients_are_switched_off_and_zeroed_as_in_any_module(parallel: ParallelModel) -> None:
    parallel.forward_backward((torch.randn(4, 3),))
    assert all(p.grad is not None for p in parallel.parameters())
    parallel.zero_grad()
    assert all(p.grad is None for p in parallel.parameters())
    parallel.requires_grad_(False)
    assert not any(p.requires_grad for p in parallel.module.parameters())


def test_what_it_is_and_where_it_is_stays(parallel: ParallelModel) -> None:
    assert parallel.to("cpu") is parallel and parallel.float() is parallel
    for change in (parallel.double, parallel.half, lambda: parallel.to(torch.bfloat16), lambda: parallel.to("meta")):
        with pytest.raises(headway.HeadwayError, match="cast the model before headway.plan"):
            change()
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in parallel.parameters())


def test_what_cannot_be_done_rank_by_rank_is_refused(parallel: ParallelModel) -> None:
    with pytest.raises(headway.HeadwayError, match="before headway.plan"):
        parallel.apply(lambda module: None)
    for how in (copy.deepcopy, AveragedModel):
        with pytest.raises(headway.HeadwayError, match=r"p\.detach\(\)\.clone\(\)"):
            how(parallel)


def test_an_attribute_of_the_model_is_found_by_what_the_error_says(parallel: ParallelModel) -> None:
    with pytest.raises(AttributeError, match=r"model\.module\.width"):
        _ = parallel.width
    assert parallel.module.width == 3
    assert not hasattr(parallel, "nothing_of_the_kind")
