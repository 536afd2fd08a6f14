"""The exact check measures what a codec does to a bucket, and drops the codec on all ranks where that is too much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.collective.exact_check import BETTER, LIMITS, MOST_VALUES
from headway.collective.reduce import Reducer
from headway.collective.world import World
from headway.journal import CodecChecked
from tests.several.ranks import on_ranks


def step(
    world: World, reducer: Reducer, parameters: dict[str, nn.Parameter], number: int, common: float
) -> list[float]:
    """Reduce normal gradients of each rank that cancel but for a part `common` of them; return each sum's error."""
    sums = {}
    for parameter in parameters.values():
        parameter.grad = None
    reducer.begin()
    reducer.arm()
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(parameter.shape, generator=generator) * (1 if world.rank == 0 else -1)
        shared = torch.randn(parameter.shape, generator=generator) * common
        gradient = noise + shared
        sums[name] = gradient.clone()
        (parameter * gradient).sum().backward()
    reducer.finish()
    errors = []
    for name, parameter in parameters.items():
        world.all_reduce(sums[name])
        errors.append(float((parameter.grad - sums[name]).norm() / sums[name].norm()))
    return errors


def checked(world: World, codec: str) -> Any:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in (("a", 2000), ("b", 1500), ("c", 1000))}
    seen: list[CodecChecked] = []
    reducer = Reducer(
        world, world.everyone, parameters, direct_bytes=0, codec=codec, check_every=2, observe=seen.append
    )
    errors = [step(world, reducer, parameters, number, 1.0 if number < 8 else 1e-3) for number in range(15)]
    state = reducer.state_dict()
    fresh = Reducer(world, world.everyone, parameters, direct_bytes=0, codec=codec, check_every=2)
    fresh.load_state_dict(state)
    assert (fresh.codec, fresh.state_dict()["steps"]) == (reducer.codec, 15)
    reducer.close()
    fresh.close()
    return seen, errors, reducer.codec


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_error_is_measured_and_a_codec_dropped(codec: str) -> None:
    (seen, errors, last), (other, other_errors, other_last) = on_ranks(2, checked, codec)
    assert seen == other and last == other_last and errors == other_errors
    plain = [event for event in seen if event.step <= 8]
    assert [event.step for event in plain] == [2, 4, 6, 8]
    assert [event.parameters for event in plain[:3]] == [("a",), ("b",), ("c",)] and plain[3].parameters == ("a",)
    for event in plain:
        place = "abc".index(event.parameters[0])
        assert event.codec == event.now == codec and event.limit == LIMITS[codec]
        assert event.error == pytest.approx(errors[event.step - 1][place], rel=1e-3)
    # From step 9 on the gradients cancel: the codec gives way, and its better, down to an exact sum.
    ladder = [(event.codec, event.now) for event in seen if event.step > 8]
    wanted = [codec]
    while wanted[-1] != "fp32":
        wanted.append(BETTER[wanted[-1]])
    assert ladder == list(zip(wanted, wanted[1:], strict=False)) and last == "fp32"
    assert max(errors[-1]) < 1e-3


def stretches(world: World) -> list[float]:
    """A bucket of three stretches, with gradients that cancel in the second alone."""
    parameters = {"large": nn.Parameter(torch.zeros(2 * MOST_VALUES + 100))}
    seen: list[CodecChecked] = []
    reducer = Reducer(world, world.everyone, parameters, codec="int8", check_every=1, observe=seen.append)
    gradient = torch.ones(2 * MOST_VALUES + 100)
    gradient[MOST_VALUES : 2 * MOST_VALUES] = torch.linspace(-1, 1, MOST_VALUES) * (1.0 if world.rank else -0.999)
    for _ in range(2):
        parameters["large"].grad = None
        reducer.begin()
        reducer.arm()
        (parameters["large"] * gradient).sum().backward()
        reducer.finish()
    return [event.error for event in seen]


def test_large_buckets_are_looked_at_in_stretches() -> None:
    for first, second in on_ranks(2, stretches):
        assert first < 1e-3 and second > 0.5


def nothing_to_say(world: World) -> list[CodecChecked]:
    parameters = {"a": nn.Parameter(torch.zeros(600))}
    seen: list[CodecChecked] = []
    reducer = Reducer(world, world.everyone, parameters, codec="int8", check_every=1, observe=seen.append)
    for value in (0.0, float("nan"), float("inf")):
        parameters["a"].grad = None
        reducer.begin()
        reducer.arm()
        (parameters["a"] * value).sum().backward()
        reducer.finish()
    return seen


def test_zeros_and_nan_say_nothing_of_a_codec() -> None:
    assert on_ranks(2, nothing_to_say) == [[], []]
