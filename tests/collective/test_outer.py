"""Few syncs: the parameters after each round are those of the formula, worked out in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.collective.outer import MOMENTUM, RATE, Outer
from headway.collective.reduce import Reducer
from headway.collective.world import World
from tests.several.ranks import on_ranks

EVERY, STEPS = 3, 8


def change(copy: int, step: int, size: int) -> torch.Tensor:
    """What a copy's inner optimizer does in a step."""
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * step + copy), dtype=torch.float64)


def by_hand(copies: int, looks: tuple[int, ...]) -> list[list[float]]:
    """Return the parameters after each step; a round ends after EVERY steps, or when somebody looks."""
    start, momentum, seen = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64), []
    mine, since = [start.clone() for _ in range(copies)], 0
    for step in range(STEPS):
        if since == EVERY or step in looks:
            mean = sum(start - one for one in mine) / copies
            momentum = MOMENTUM * momentum + mean
            start = start - RATE * (mean + MOMENTUM * momentum) if since else start
            mine, since = [start.clone() for _ in range(copies)], 0
        mine = [one + change(copy, step, 5) for copy, one in enumerate(mine)]
        since += 1
        seen.append(mine[0].tolist())
    return seen


def rounds(world: World, looks: tuple[int, ...], codec: str = "fp32") -> Any:
    dtype = torch.float64 if codec == "fp32" else torch.float32
    weight = nn.Parameter(torch.zeros(5, dtype=dtype))

    def make() -> Outer:
        reducer = Reducer(world, world.everyone, {"weight": weight}, direct_bytes=0, codec=codec)
        return Outer(reducer, {"weight": weight}, world.size, EVERY)

    outer, seen = make(), []
    for step in range(STEPS):
        if step in looks:
            state = outer.state_dict()
            outer = make()  # and goes on from its state
            outer.load_state_dict(state)
        elif outer.due:
            outer.sync()
        weight.grad = torch.full_like(weight, 7.0)
        outer.begin()
        with torch.no_grad():
            weight += change(world.rank, step, 5).to(dtype)
        assert weight.grad.tolist() == [7.0] * 5
        seen.append(weight.tolist())
    outer.sync()
    return seen, weight.detach().double()


@pytest.mark.parametrize("looks", [(), (4, 5)])
def test_rounds_are_those_of_the_formula(looks: tuple[int, ...]) -> None:
    answers = on_ranks(2, rounds, looks)
    assert torch.tensor(answers[0][0]).allclose(torch.tensor(by_hand(2, looks)), atol=1e-12)
    assert torch.equal(answers[0][1], answers[1][1])


def test_a_codec_is_near() -> None:
    (seen, last), (_, other) = on_ranks(2, rounds, (), "int8")
    assert torch.equal(last, other)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(by_hand(2, ())), rtol=0, atol=0.1)
