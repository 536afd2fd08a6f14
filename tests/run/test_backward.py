"""A loss function that calls backward itself, or scales what it returns: refused where it would train wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headway
from headway.collective.world import World
from headway.errors import HeadwayError
from headway.graph.record import record
from headway.layout.split import split
from headway.run.parallel import ParallelModel
from tests.run.staged import train_staged, train_whole

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def small(*, drop: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5) if drop else nn.Tanh(), nn.Linear(5, 1))


def value_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def by_method(model: nn.Module, value: torch.Tensor, x: torch.Tensor) -> None:
    value.backward(retain_graph=True)


def by_function(model: nn.Module, value: torch.Tensor, x: torch.Tensor) -> None:
    torch.autograd.backward(value / 2, retain_graph=True)


def by_itself(model: nn.Module, value: torch.Tensor, x: torch.Tensor) -> None:
    next(model.parameters()).sum().backward()


def named(model: nn.Module, value: torch.Tensor, x: torch.Tensor) -> None:
    value.backward(inputs=[next(model.parameters())], retain_graph=True)


def to_the_input(model: nn.Module, value: torch.Tensor, x: torch.Tensor) -> None:
    seen = x.detach().requires_grad_()
    model(seen).sum().backward()


def scaled(model: nn.Module, value: torch.Tensor, x: torch.Tensor) -> None:
    torch.amp.GradScaler("cpu").scale(value).backward()


WRONG = (by_method, by_function, by_itself, named, to_the_input, scaled)


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    seen = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value_of(model, seen), seen, create_graph=True)
    return value_of(model, x) + slope.square().sum()


def attack(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    seen = x.detach().clone().requires_grad_()
    value_of(model, seen).backward(inputs=[seen])
    return value_of(model, x + 0.1 * seen.grad.sign())


def fitted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    shift = torch.zeros(3, requires_grad=True)
    for _ in range(2):
        (x + shift).square().sum().backward()
        shift = (shift - 0.1 * shift.grad).detach().requires_grad_()
    return value_of(model, x + shift)


def again(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: value_of(model, t), x.clone().requires_grad_(), use_reentrant=True)


def refuses(run: Callable[[], Any], words: str = "calls backward") -> None:
    with pytest.raises(HeadwayError, match=words) as refusal:
        run()
    assert "test_backward.py:" in str(refusal.value.place) and refusal.value.remedy


@pytest.mark.parametrize("wrong", WRONG)
def test_a_backward_that_reaches_parameters_is_refused_when_planned_and_when_run(wrong: Any) -> None:
    calm = True

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = value_of(model, x)
        if not calm:
            wrong(model, value, x)
        return value

    words = "GradScaler" if wrong is scaled else "calls backward.* gradient of"
    for drop in (False, True):
        model = small(drop=drop)
        calm = True
        parallel = ParallelModel(model, loss, headway.plan(model, loss, X), World())
        calm = False
        refuses(lambda: parallel.forward_backward(X), words)  # noqa: B023
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        calm = True
        assert parallel.forward_backward(X) > 0
    calm = False
    for model in (small(), small().to("meta")):
        refuses(lambda: headway.plan(model, loss, X, cluster="2xcpu"), words)  # noqa: B023
        assert all(p.grad is None for p in model.parameters())


def test_the_stage_that_computes_the_loss_refuses_too() -> None:
    calm = True

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = value_of(model, x)
        if not calm:
            value.backward(retain_graph=True)
        return value

    graph = record(small(), loss, X)
    parts = split(graph, (graph.cuts[1].name,))
    calm = False
    refuses(lambda: train_staged(small(), loss, X, 4, parts))


@pytest.mark.parametrize("right", [penalty, attack, fitted, again])
def test_gradients_that_are_part_of_the_loss_are_as_on_one_device(right: Any) -> None:
    model = small()
    graph = record(model, right, X)
    want = train_whole(model, right, X, graph)
    parallel = ParallelModel(model, right, headway.plan(model, right, X), World())
    assert parallel.forward_backward(X) == pytest.approx(float(want.loss))
    for name, p in parallel.named_parameters():
        torch.testing.assert_close(p.grad, want.gradients[name])
    assert bool(graph.cuts) == (right in (penalty, fitted))
    for cut in graph.cuts:
        got = train_staged(small(), right, X, 4, split(graph, (cut.name,)))
        torch.testing.assert_close(got.gradients, want.gradients)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.Tensor.backward,
        torch.autograd.backward,
        lambda value: (value / 4).backward(),
        lambda value: torch.amp.GradScaler("cpu").scale(value).backward(),
    ],
)
def test_backward_from_what_a_step_returned_is_refused(wrong: Callable[[torch.Tensor], Any]) -> None:
    model = small()
    parallel = ParallelModel(model, value_of, headway.plan(model, value_of, X), World())
    value = parallel.forward_backward(X)
    before = [p.grad.clone() for p in parallel.parameters()]
    refuses(lambda: wrong(value), "on a number that needs no gradient")
    refuses(lambda: wrong(parallel.evaluate(X)), "on a number that needs no gradient")
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parallel.parameters(), before, strict=True))
    (value * next(parallel.parameters()).sum()).backward()  # a loss of the script's own, in which it is a factor


def test_a_scaler_that_is_switched_off_is_none() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(value_of(model, x))

    model = small()
    assert ParallelModel(model, loss, headway.plan(model, loss, X), World()).forward_backward(X) > 0
