"""Courier on real processes: sums arrive at their owner, values at everyone, and a lost rank is named."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from headway.collective.codec import CODECS
from headway.collective.courier import Courier, by_collectives
from headway.collective.world import PeerError, World
from tests.several.ranks import on_ranks, outcomes_on_ranks

SIZES = (1, 100, 70_001, 1_200_000)  # the largest in several pieces
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)


def values_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    return ((torch.arange(size) * 7 + rank * 3) % 11 - 5).to(dtype)


def carry(world: World) -> None:
    group = world.group(range(world.size))
    courier = Courier(world, group)
    under_way = []
    for number, (size, dtype) in enumerate((s, d) for s in SIZES for d in DTYPES):
        owner = number % world.size
        mine = values_of(world.rank, size, dtype)
        news, before = values_of(100 + world.rank, size, dtype), mine.clone()
        under_way.append((owner, mine, news, courier.collect(mine, owner), courier.spread(news, owner), before, size))
    for owner, mine, news, collected, spread, before, size in under_way:
        collected.wait()
        spread.wait()
        if owner == world.rank:
            assert torch.equal(mine, sum(values_of(r, size, mine.dtype) for r in range(world.size)))
        else:
            assert torch.equal(mine, before)
        assert torch.equal(news, values_of(100 + owner, size, mine.dtype))
        for collect, want in ((True, mine), (False, news)):
            again = before.clone() if collect else values_of(100 + world.rank, size, mine.dtype)
            if again.dtype is not torch.bfloat16:  # gloo does not reduce it
                by_collectives(world, group, None, again, owner, collect, "values")
                assert torch.equal(again, want)
    courier.close()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_go_to_owners_and_values_to_all(size: int) -> None:
    on_ranks(size, carry)


def carry_coded(world: World) -> dict[str, list[torch.Tensor]]:
    group = world.group(range(world.size))
    found: dict[str, list[torch.Tensor]] = {}
    for name in ("bf16", "fp16", "int8"):
        courier = Courier(world, group, CODECS[name])
        for size in (100, 70_001):
            values = torch.randn(size, generator=torch.Generator().manual_seed(world.rank))
            values[size // 2] = float("nan") if world.rank == 0 else 1.0
            other = values.clone()
            delivery = courier.collect(values, 1)
            counts = torch.ones(3, dtype=torch.int32)
            exact = courier.collect(counts, 1)
            delivery.wait()
            exact.wait()
            by_collectives(world, group, CODECS[name], other, 1, True, "values")
            if world.rank == 1:
                assert counts.tolist() == [world.size] * 3
                found.setdefault(name, []).append(values)
                torch.testing.assert_close(values, other, equal_nan=True, rtol=1e-2, atol=1e-2)
        courier.close()
    return found


def test_a_codec_rounds_each_message_once() -> None:
    found = on_ranks(3, carry_coded)[1]
    for name, results in found.items():
        for got, size in zip(results, (100, 70_001), strict=True):
            parts = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
            parts[0][size // 2] = float("nan")
            parts[1][size // 2] = parts[2][size // 2] = 1.0
            want = sum(part.double() for part in parts)
            # the owner's own part is not rounded; the sum itself rounds in float32
            bound = CODECS[name].bound(parts[0]) + CODECS[name].bound(parts[2]) + 1e-6
            fine = torch.ones(size, dtype=torch.bool)
            fine[size // 2] = False
            assert bool(((got - want).abs() <= bound)[fine].all()), name
            assert bool(got[size // 2].isnan())


def lose_a_rank(world: World) -> Any:
    courier = Courier(world, world.group(range(world.size)))
    first = courier.collect(torch.ones(1000), 0)
    first.wait()
    if world.rank == 1:
        os._exit(7)
    deliveries = [courier.collect(torch.ones(3_000_000), 0), courier.spread(torch.ones(10), 1, "new values of w")]
    with pytest.raises(PeerError) as caught:
        for delivery in deliveries:
            delivery.wait()
    with pytest.raises(PeerError):
        courier.collect(torch.ones(3), 0).wait()
    assert caught.value.peers == (1,)
    os._exit(0)


def test_a_lost_rank_ends_every_delivery() -> None:
    outcomes = outcomes_on_ranks(2, lose_a_rank, timeout=30.0, deadline=10.0)
    assert outcomes[0].code == 0, outcomes[0].trace
    assert outcomes[1].code == 7
