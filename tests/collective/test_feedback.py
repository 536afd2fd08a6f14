"""Error feedback in the Reducer: nothing is lost over steps, and its state continues a run, also on other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.collective.reduce import Reducer
from headway.collective.world import World
from tests.several.ranks import on_ranks

MODES = {"direct": 0, "flat": 1 << 40}  # direct_bytes


class Net(nn.Module):
    """Two layers, one that nobody uses, one that is used in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(30, 20), nn.Linear(20, 3, bias=False)
        self.never, self.sometimes = nn.Linear(4, 4), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if sometimes:
            h = h + self.sometimes(h)
        return self.second(h).square().mean()


def make(world: World, mode: str, codec: str = "int4") -> tuple[Net, Reducer]:
    model = Net()
    named = dict(model.named_parameters())
    return model, Reducer(world, world.everyone, named, direct_bytes=MODES[mode], bucket_bytes=2000, codec=codec)


def step(world: World, model: Net, reducer: Reducer, number: int) -> dict[str, torch.Tensor]:
    """Reduce the gradients of step `number`; parameters do not change, so that gradients of a step are known."""
    generator = torch.Generator().manual_seed(10 * number + world.rank)
    model.zero_grad()
    reducer.begin(1.0 / world.size)
    reducer.arm()
    model(torch.randn(8, 30, generator=generator), number % 2 == 0).backward()
    reducer.finish(0.5)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def nothing_is_lost(world: World, mode: str, codec: str) -> list[float]:
    """Compare the sums of all steps with exact ones: what is missing is what `state_dict` owes. Returns its parts."""
    model, reducer = make(world, mode, codec)
    exact_model, exact = make(world, mode, "fp32")
    total: dict[str, torch.Tensor] = {}
    for number in range(7):
        got, want = step(world, model, reducer, number), step(world, exact_model, exact, number)
        assert got.keys() == want.keys()
        assert ("sometimes.weight" in got) == (number % 2 == 0)
        for name, gradient in want.items():
            total[name] = total.get(name, 0.0) + (gradient - got[name])
    owed = reducer.state_dict()["residuals"]
    assert owed.keys() == {name for name, _ in model.named_parameters()}
    parts = []
    for name, missing in total.items():
        left = owed[name].clone()
        world.all_reduce(left)
        largest = float(exact_model.get_parameter(name).grad.abs().max()) if name in want else 1e-2
        torch.testing.assert_close(0.5 * left, missing, rtol=0, atol=1e-5 * largest + 1e-8)
        parts.append(float(left.abs().max()))
    assert not owed["never.weight"].any()
    reducer.close()
    return parts


def nothing_is_lost_anywhere(world: World, codec: str) -> list[list[float]]:
    return [nothing_is_lost(world, mode, codec) for mode in MODES]


@pytest.mark.parametrize("codec", ["int4", "powersgd:1"])
def test_what_is_missing_is_what_the_state_owes(codec: str) -> None:
    for modes in on_ranks(2, nothing_is_lost_anywhere, codec):
        for parts in modes:
            assert min(parts) > 0 if codec == "int4" else max(parts) > 0


def resumes(world: World, codec: str) -> bool:
    return all(resumes_in(world, mode, codec) for mode in MODES)


def resumes_in(world: World, mode: str, codec: str) -> bool:
    """Seven steps in a row are those of four, and three of a new Reducer with the state of the first, bit for bit."""
    model, reducer = make(world, mode, codec)
    whole = [step(world, model, reducer, number) for number in range(7)]
    model, reducer = make(world, mode, codec)
    for number in range(4):
        step(world, model, reducer, number)
    state = reducer.state_dict()
    step(world, model, reducer, 9)  # the state is a copy
    model, reducer = make(world, mode, codec)
    reducer.load_state_dict(state)
    rest = [step(world, model, reducer, number) for number in range(4, 7)]
    return all(torch.equal(one[name], two[name]) for one, two in zip(whole[4:], rest, strict=True) for name in one)


@pytest.mark.parametrize("codec", ["fp16", "int4", "powersgd"])
def test_a_resumed_reducer_continues_bit_for_bit(codec: str) -> None:
    assert on_ranks(2, resumes, codec) == [True, True]


def other_codec(world: World, codec: str) -> Any:
    """Residuals go, once, into the next sums of a codec that keeps none."""
    model, reducer = make(world, "flat", codec)
    exact_model, exact = make(world, "flat", "fp32")
    owed = {"first.weight": torch.full((20, 30), 0.25 * (1 + world.rank)), "gone": torch.ones(3)}
    state = {**reducer.state_dict(), "asked": "int4", "codec": "int4", "copies": 5}
    reducer.load_state_dict({**state, "residuals": owed})
    differences = []
    for number in range(2):
        got, want = step(world, model, reducer, number), step(world, exact_model, exact, number)
        differences.append((got["first.weight"] - want["first.weight"]).mean().item())
    left = reducer.state_dict()["residuals"]
    with pytest.raises(ValueError, match=r"first.weight is \[20, 30\], what it lost \[2\]"):
        reducer.load_state_dict({**state, "residuals": {"first.weight": torch.zeros(2)}})
    return differences, left


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_was_owed_is_paid_by_another_codec(codec: str) -> None:
    for (first, second), left in on_ranks(2, other_codec, codec):
        assert first == pytest.approx(0.5 * 0.75, rel=1e-2) and abs(second) < 1e-4
        assert left == {}


def test_one_process_has_nothing_to_keep() -> None:
    model = Net()
    reducer = Reducer(World(), World().everyone, dict(model.named_parameters()), codec="int4")
    state = reducer.state_dict()
    assert (state["codec"], state["copies"], state["residuals"]) == ("int4", 1, {})
    reducer.load_state_dict({**state, "copies": 2, "order": ["first.weight"]})
