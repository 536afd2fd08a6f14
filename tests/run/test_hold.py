"""check_parameters: a plan meets the model that it was made for, or says how the other one differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
import torch
from torch import nn

import headway
from headway.errors import PlanError
from headway.run.hold import check_parameters


class Net(nn.Module):
    """Two weights that can change places."""

    def __init__(self, inner: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4, inner)), nn.Parameter(torch.ones(inner, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.second


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def turned() -> Net:
    net = Net()
    net.first, net.second = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, 6))
    return net


def frozen() -> Net:
    net = Net()
    net.first.requires_grad_(False)
    return net


def named() -> Net:
    net = Net()
    net.third = nn.Parameter(torch.ones(()))
    return net


def plan() -> headway.Plan:
    return headway.plan(Net(), loss, torch.zeros(4, 4), cluster="2xcpu:64MiB", fixed={"pipeline": 2})


def test_the_model_that_was_planned() -> None:
    check_parameters(Net(), plan())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (turned, "shapes or dtypes are not"),
        (lambda: Net().double(), "shapes or dtypes are not"),
        (lambda: Net(7), "it was made for 48 parameters, this one has 56"),
        (named, "third is not in the plan"),
        (frozen, "other parameters require gradients"),
        (lambda: Net().to("meta"), "is on the meta device"),
    ],
)
def test_another_model(other: Callable[[], Net], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_parameters(other(), plan())


def test_a_plan_file_of_before_is_taken_by_names_and_numbers(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.toml")
    table = tomlkit.loads((tmp_path / "plan.toml").read_text())
    for name in ("weights", "trained"):
        del table["made_for"][name]
    (tmp_path / "plan.toml").write_text(tomlkit.dumps(table))
    old = headway.Plan.load(tmp_path / "plan.toml")
    check_parameters(Net(), old)
    check_parameters(turned(), old)
    with pytest.raises(PlanError, match="third is not in the plan"):
        check_parameters(named(), old)
