"""Backward in two parts: I gives the gradients of inputs alone, I and W together those of a whole backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.cost.model import WAITING
from headway.errors import SplitError
from headway.graph.walk import function_name
from headway.run.apart import READ, Apart

Program = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Weights of every kind of product, and of a norm, whose gradients do not wait."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.bare = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.table = nn.Embedding(9, 6, padding_idx=2)
        self.conv1 = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.conv2 = nn.Conv2d(2, 4, (3, 1), stride=2, dilation=(1, 2))
        self.conv3 = nn.Conv3d(1, 2, 2, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.double()


def linear(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.bare(torch.tanh(net.norm(net.linear(x)))).square().sum()


def products(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(net.bias, x.reshape(-1, 6), net.weight)
    y = torch.tanh(y) @ net.weight  # used twice
    return (torch.matmul(y, net.weight).mm(net.weight) * y.matmul(net.weight)).sum()


def convolutions(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv1(x.transpose(1, 2)).tanh()
    z = net.conv2(torch.stack([y, y + 1], 1)).tanh()
    return net.conv3(z[:, None]).square().sum()


def embedding(net: Any, x: torch.Tensor) -> torch.Tensor:
    index = (x.detach() * 7).long().abs() % 9
    return (net.table(index) * F.embedding(index, net.table.weight, 0, scale_grad_by_freq=True)).tanh().sum()


def penalty(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    value = net.bare(torch.tanh(net.linear(x))).square().sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return value + gradient.square().sum()


def equilibrium(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Take gradients of a graph of the forward inside backward, as implicit layers do."""

    def cell(z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(net.linear(z) * 0.1 + x)

    with torch.no_grad():
        z = x
        for _ in range(20):
            z = cell(z)
    z = cell(z)
    start = z.clone().detach().requires_grad_()
    again = cell(start)

    def solve(grad: torch.Tensor) -> torch.Tensor:
        y = grad
        for _ in range(5):
            y = torch.autograd.grad(again, start, y, retain_graph=True)[0] + grad
        return y

    z.register_hook(solve)
    return net.bare(z).square().sum()


def recomputed(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda v: torch.tanh(net.linear(v)), x, use_reentrant=False)
    y = checkpoint(lambda v: torch.tanh(net.bare(v)), y, use_reentrant=True)
    return net.linear(y).square().sum()


def mapped(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: net.linear(row).tanh())(x).square().sum() + net.bare(x).sum()


def lower_precision(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x.float(), net.linear.weight.float(), net.linear.bias.float())
    return net.bare(y.double()).square().sum()


def compiled(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(net.linear, backend="eager")(net.bare(x)).square().sum()


def frozen(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.linear.weight.requires_grad_(False)
    net.bare.weight.requires_grad_(False)
    return net.bare(torch.tanh(net.linear(x))).square().sum()


PROGRAMS = (
    linear, products, convolutions, embedding, penalty, equilibrium, recomputed, mapped, lower_precision, compiled,
    frozen,
)  # fmt: skip


def gradients(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    return {"x": x.grad} | {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_both_parts_together_are_a_whole_backward(program: Program) -> None:
    net = Net()
    plain, split = deepcopy(net), deepcopy(net)
    apart = Apart()
    for seed in range(3):
        x = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        want = program(plain, theirs)
        want.backward()
        with apart:
            got = program(split, ours)
        assert torch.equal(want, got)
        with apart.collect([got]) as later:
            got.backward()
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
        later.finish()
        for name, gradient in gradients(plain, theirs).items():
            found = gradients(split, ours)[name]
            assert (gradient is None) == (found is None), name
            if gradient is not None and found is not None:
                assert torch.allclose(gradient, found, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_without_a_w_backward_is_whole(program: Program) -> None:
    net = Net()
    plain, split = deepcopy(net), deepcopy(net)
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    program(plain, x).backward()
    with Apart():
        value = program(split, x)
    value.backward()
    for (name, p), q in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-11, atol=1e-12), name


def test_weights_wait_and_norms_do_not() -> None:
    net, apart = Net(), Apart()
    with apart:
        value = linear(net, torch.randn(2, 6, dtype=torch.float64))
    with apart.collect([value]) as later:
        value.backward()
    assert {n for n, p in net.named_parameters() if p.grad is not None} == {"norm.weight", "norm.bias"}
    fired: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    later.finish()
    assert fired == ["bare.weight", "linear.weight", "linear.bias"]
    assert not later.left


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_weights_see_gradients(kind: str) -> None:
    net, apart, seen = Net(), Apart(), []
    for weight in (net.linear.bias, net.bare.weight):
        getattr(weight, kind)(lambda given: seen.append(given.shape))
    with apart:
        value = linear(net, torch.randn(2, 6, dtype=torch.float64))
    with apart.collect([value]) as later:
        value.backward()
    later.finish()
    assert seen == [net.bare.weight.shape, net.linear.bias.shape]


def test_what_is_needed_is_freed_one_by_one() -> None:
    net, apart = Net(), Apart()
    with apart:
        kept = [torch.randn(2, 6, dtype=torch.float64)]
        for layer in (net.linear, net.bare, net.linear):
            kept.append(layer(kept[-1]))
        value = kept[-1].sum()
    with apart.collect([value]) as later:
        value.backward()
    inputs = [weakref.ref(x) for x in kept[:3]]
    del kept, value
    alive: list[list[bool]] = []
    for layer in (net.linear, net.bare):
        layer.weight.register_post_accumulate_grad_hook(lambda p: alive.append([x() is not None for x in inputs]))
    later.finish()
    assert alive == [[False, True, False], [False, False, False]]


def test_a_value_changed_between_the_parts_is_refused() -> None:
    net, apart = Net(), Apart()
    x = torch.randn(2, 6, dtype=torch.float64)
    with apart:
        value = net.linear(x).sum()
    with apart.collect([value]) as later:
        value.backward()
    x.mul_(2)
    with pytest.raises(SplitError, match=r"shape \[2, 6\] was changed in place.*before the weight gradient"):
        later.finish()


def test_the_planner_knows_which_functions_wait() -> None:
    assert {function_name(function) for function in READ} <= WAITING
