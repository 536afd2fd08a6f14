"""Programs in several processes that are unlike most: outputs without use, batches that are written, in-place calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

Answer = tuple[float, dict[str, torch.Tensor | None]]


class TwoHeads(nn.Module):
    """Gives a second output, which the loss does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.side = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.a(x)
        side = self.side(x)
        return self.c(self.b(x)), side.tanh()


class Writing(nn.Module):
    """Writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x.sub_(0.5)
        h = x * 1
        for layer in self.layers:
            h = layer(h) + x
        return h, None


class InPlace(nn.Module):
    """Changes what linear layers of three dims give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.layers(x.unsqueeze(1).repeat(1, 2, 1)), None


class Packed(nn.Module):
    """Computes with some rows only, which the batch tells: what crosses has another shape in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        keep = x[:, 0] > -0.5
        made = torch.zeros_like(x)
        made[keep] = self.c(self.b(self.a(x[keep])).tanh())
        return made, None


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x)[0] ** 2).mean()


def inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Take more from the model's result to the loss, so that a cut lies in between."""
    made = model(x)[0]
    return (made**2).masked_fill(made > 1, 0.5).mean()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "a second output": (TwoHeads, loss, {"cuts": ["b"]}),
    "a batch that is written": (
        Writing,
        loss,
        {"cuts": ["layers.1", "layers.2", "layers.3"], "schedule": "interleaved"},
    ),
    "in place after linear": (InPlace, loss, {"cuts": ["layers.2"], "schedule": "zero_bubble"}),
    "rows that the batch tells": (Packed, loss, {"cuts": ["c"], "num_micro_batches": 4}),
    "cut in the loss": (TwoHeads, inside, {"cuts": ["loss#1.2"]}),
    "stages of a rank": (TwoHeads, inside, {"cuts": ["b", "loss#1.1", "loss#1.2"], "schedule": "interleaved"}),
}


def plain(name: str) -> Answer:
    make, of, _ = PROGRAMS[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(8, 3).double()
    value = of(model, x)
    value.backward()
    return float(value.detach()), {n: p.grad for n, p in model.named_parameters()}


def in_stages(world: World) -> list[Answer]:
    found = []
    for make, of, fixed in PROGRAMS.values():
        torch.manual_seed(0)
        model, x = make().double(), torch.randn(8, 3).double()
        settings = {"pipeline": 2, "num_micro_batches": 2, **fixed}
        plan = headway.plan(model, of, x.clone(), cluster="2xcpu:4GiB", fixed=settings)
        parallel = ParallelModel(model, of, plan, world)
        value = float(parallel.forward_backward(x.clone()))
        gradients = {name: p.grad for name, p in parallel.named_parameters()}
        model_alone = make().double()
        model_alone.load_state_dict(parallel.state_dict())
        for _ in range(2):  # messages of two kinds, one shape
            parallel.evaluate(x.clone())
            made, wanted = parallel.predict(x.clone())[0], model_alone(x.clone())[0]
            assert torch.allclose(made, wanted, rtol=0, atol=1e-12)
        found.append((value, gradients))
    return found


@pytest.fixture(scope="module")
def answers() -> list[list[Answer]]:
    return on_ranks(2, in_stages)


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_train_as_one_process_does(name: str, answers: list[list[Answer]]) -> None:
    value, gradients = plain(name)
    together: dict[str, torch.Tensor | None] = {}
    for rank in answers:
        mine, own = rank[list(PROGRAMS).index(name)]
        assert abs(mine - value) < 1e-12
        together |= own
    assert together.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        found = together[parameter]
        if gradient is None:  # nothing to learn from: an optimizer must leave it alone
            assert found is None, parameter
        else:
            assert found is not None and torch.allclose(found, gradient, rtol=0, atol=1e-12), parameter
