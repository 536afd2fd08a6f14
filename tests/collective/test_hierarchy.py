"""Sums host by host on real processes: right, the same bits on every rank, failures named."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from headway.collective.codec import CODECS
from headway.collective.hierarchy import CHUNK_BYTES, Hierarchy
from headway.collective.reduce import Reducer
from headway.collective.world import PeerError, World
from headway.errors import RankError
from tests.several.ranks import SOON, on_ranks, outcomes_on_ranks

SIZES = (1, 3, 700, 5000, CHUNK_BYTES // 4 + 1000)
SCALES = {"int8": 1 / 254, "fp16": 2.0**-11, "int4": 1 / 14}


def values_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank)).to(dtype)


def sums(world: World) -> list[bytes]:
    """Sum tensors of many sizes in several ways, all under way at a time; return the bits."""
    bits = []
    ways = [(None, torch.float32), (None, torch.float64), ("int8", torch.float32), ("fp16", torch.float32)]
    for codec, dtype in ways:
        engine = Hierarchy(world, world.everyone, 2, None if codec is None else CODECS[codec])
        inputs = [[values_of(rank, size, dtype) for rank in range(world.size)] for size in SIZES]
        mine = [parts[world.rank].clone() for parts in inputs]
        under_way = [engine.start(values) for values in mine]
        for reduction, values, parts in zip(under_way, mine, inputs, strict=True):
            reduction.wait()
            exact = sum(part.double() for part in parts)
            assert isinstance(exact, torch.Tensor)
            # Each host's sum is rounded once, and their sum.
            limit = 1e-5 if codec is None else 2.5 * SCALES[codec] * max(1.0, float(exact.abs().max()))
            assert float((values.double() - exact).abs().max()) <= limit * (1e-7 if dtype == torch.float64 else 1)
            bits.append(values.numpy().tobytes())
        engine.close()
    return bits


def owed(world: World) -> bool:
    """Nothing is lost with error feedback."""
    engine = Hierarchy(world, world.everyone, 2, CODECS["int4"])
    parts = [values_of(rank, 5000) for rank in range(world.size)]
    exact = sum(part.double() for part in parts)
    residual, total = torch.zeros(5000), torch.zeros(5000, dtype=torch.float64)
    for count in range(1, 6):
        values = parts[world.rank].clone()
        engine.start(values, residual=residual).wait()
        total += values
        left = residual.double()
        world.all_reduce(left)
        torch.testing.assert_close(total + left, exact * count, rtol=0, atol=1e-4)
    engine.close()
    return bool((total - exact * 5).norm() > 1e-3)


def reduced(world: World, codec: str) -> Any:
    """Gradients of a Reducer that goes host by host, and of one that does not, some of float64."""
    found = []
    for neighbours in (2, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20).double(), nn.Linear(3, 3))
        reducer = Reducer(
            world, world.everyone, dict(model.named_parameters()), codec=codec, neighbours=neighbours, direct_bytes=2000
        )
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(world.rank))
        for _ in range(2):
            model.zero_grad()
            reducer.begin(1.0 / world.size)
            reducer.arm()
            model[2](model[1](model[0](x)).double()).square().mean().backward()
            reducer.finish()
        assert reducer.unused == ("3.weight", "3.bias")
        found.append({name: p.grad for name, p in model.named_parameters()})
        reducer.close()
    return found


def several(world: World) -> Any:
    with pytest.raises(RankError, match="4 ranks are not several hosts of 3"):
        Hierarchy(world, world.everyone, 3)
    return sums(world), owed(world), {codec: reduced(world, codec) for codec in ("fp32", "int8")}


@pytest.mark.several
def test_sums_are_right_and_the_same_on_every_rank() -> None:
    answers = on_ranks(4, several, timeout=90.0)
    assert all(answer[0] == answers[0][0] and answer[1] for answer in answers)
    for codec, (by_host, flat) in answers[0][2].items():
        for name, gradient in flat.items():
            for answer in answers[1:]:
                other = answer[2][codec][0][name]
                assert other is None if gradient is None else torch.equal(other, by_host[name]), name
            if gradient is None:
                assert by_host[name] is None, name
            else:
                exact = codec == "fp32" or gradient.dtype == torch.float64
                limit = (1e-6 if exact else 0.03) * float(gradient.abs().max())
                assert float((by_host[name] - gradient).abs().max()) <= limit, (codec, name)


def dies(world: World, codec: str | None) -> None:
    engine = Hierarchy(world, world.everyone, 2, None if codec is None else CODECS[codec])
    for step in range(100):
        if world.rank == 2 and step == 3:
            os._exit(5)
        engine.start(torch.ones(500_000), "the gradient of w").wait()


@pytest.mark.several
@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_rank_that_dies_is_named(codec: str | None) -> None:
    outcomes = outcomes_on_ranks(4, dies, codec, deadline=20.0)
    assert outcomes[2].code == 5
    left = [outcomes[rank] for rank in (0, 1, 3)]
    for outcome in left:
        assert isinstance(outcome.error, PeerError), outcome.trace
        assert "the gradient of w" in str(outcome.error) and outcome.seconds - outcomes[2].seconds < SOON
    assert any(outcome.error.peers == (2,) for outcome in left), [str(outcome.error) for outcome in left]
