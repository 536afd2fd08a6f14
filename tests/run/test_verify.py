"""verify_split: what is compared under which budget, that a wrong division is found, that nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import SplitError
from headway.graph.model import ModelGraph
from headway.graph.record import record
from headway.journal import Verified
from headway.layout.split import Split, split
from headway.run.verify import verify_split

WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
SAVED = 100_000  # more than what autograd keeps and what a call takes


class Net(nn.Module):
    """Layers, batch norm that changes buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).tanh())
        return self.norm(x)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def case(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor, Split, Callable[[int], ModelGraph]]:
    torch.manual_seed(0)
    model: Any = make()
    batch = torch.randn(8, WIDTH)
    model.layers[1].weight.requires_grad_(False)
    model.layers[0].weight.grad = torch.ones(WIDTH, WIDTH)

    graph = record(model, loss, batch[:2])
    return model, batch, split(graph, ("layers.1", "layers.3")), lambda samples: graph


def verified(memory: int | None, make: Callable[[], nn.Module] = Net) -> Verified:
    model, batch, parts, graph_at = case(make)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    try:
        return verify_split(model, loss, batch, parts, graph_at, memory=memory)
    finally:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert torch.equal(torch.get_rng_state(), state)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert list(grads) == ["layers.0.weight"] and torch.equal(grads["layers.0.weight"], torch.ones(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (None, "3 stages against the undivided model, 2 samples"),
        (4 * LAYER + 2 * 4 * LAYER + SAVED, "3 stages against the undivided model, 2 samples"),
        (4 * LAYER + 2 * 2 * LAYER + SAVED // 2, "gradients of one stage after the other"),
        (4 * LAYER + SAVED // 2, "the loss alone"),
        (4 * LAYER, "not verified"),
    ],
)
def test_as_much_is_compared_as_fits(memory: int | None, words: str) -> None:
    outcome = verified(memory)
    assert words in outcome.what and outcome.passed
    assert (outcome.largest_difference is None) == (words == "not verified")
    assert outcome.largest_difference is None or outcome.largest_difference < 1e-5


def moody() -> nn.Module:
    """Make a model whose first layer's gradient grows from call to call."""
    model, calls = Net(), [0]

    def hook(module: nn.Module, args: Any, result: torch.Tensor) -> None:
        calls[0] += 1
        result.register_hook(lambda gradient, times=calls[0]: gradient * times)

    model.layers[0].register_forward_hook(hook)
    return model


@pytest.mark.parametrize("memory", [None, 4 * LAYER + 2 * 2 * LAYER + SAVED // 2])
def test_a_wrong_gradient_is_found_by_name(memory: int | None) -> None:
    with pytest.raises(SplitError, match=r"the gradient of layers\.0\.(weight|bias) differs"):
        verified(memory, moody)


def test_a_model_on_meta_is_not_verified() -> None:
    model: Any = Net()
    graph = record(model, loss, torch.zeros(2, WIDTH))
    outcome = verify_split(
        Net().to("meta"), loss, torch.zeros(2, WIDTH), split(graph, ("layers.1",)), lambda samples: graph
    )
    assert "no values" in outcome.what and outcome.largest_difference is None
