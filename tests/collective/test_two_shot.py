"""Two-shot sums on real processes: right within the codecs' bounds, the same bits on every rank, failures named."""

from __future__ import annotations

import os
import time

import pytest
import torch

from headway.collective.codec import CODECS, Codec
from headway.collective.pieces import by_collectives, part_of
from headway.collective.two_shot import DEPTH, ROUND_VALUES, TwoShot
from headway.collective.world import PeerError, World
from headway.planner.wire import ROUND_BYTES, ROUNDS
from tests.several.ranks import on_ranks, outcomes_on_ranks

SIZES = (1, 3, 511, 512, 1537, 5000, 20_001)


def gradient(rank: int, size: int, number: int) -> torch.Tensor:
    """Return what a rank has: heavy-tailed, a different one for each rank, size and number."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * size + rank)
    values = torch.randn(size, generator=generator)
    return values / torch.rand(size, generator=generator).clamp(min=1e-3) * 1e-4


def allowed(codec: Codec, parts: list[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Return the error that the sum may have: of each part on its way, of the result, and of adding in float32."""
    adding = sum(part.double().abs() for part in parts) * 2.0**-22
    # Scales of fp16 are of a message, so of the largest value in it; blocks of int8 are the same everywhere.
    whole = [codec.bound(part).double() for part in (*parts, result)]
    return 1.01 * sum(whole) + adding


def sums(world: World) -> list[bytes]:
    """Sum tensors of many sizes with every codec, several under way at a time; return the bits of all results."""
    bits = []
    for name, codec in CODECS.items():
        # Small rounds: of pieces of 1024 values at most, so that large tensors take many.
        engine = TwoShot(world, world.everyone, codec, round_values=1024 * world.size, depth=2)
        for repeat in range(3):
            inputs = [[gradient(rank, size, repeat) for rank in range(world.size)] for size in SIZES]
            mine = [parts[world.rank].clone() for parts in inputs]
            under_way = [engine.start(values) for values in mine]
            for reduction, values, parts in zip(under_way, mine, inputs, strict=True):
                reduction.wait()
                exact = sum(part.double() for part in parts)
                assert isinstance(exact, torch.Tensor)
                error = (values.double() - exact).abs()
                assert bool((error <= allowed(codec, parts, exact.float())).all()), (name, values.numel())
                bits.append(values.numpy().tobytes())
        engine.close()
    return bits


@pytest.mark.several
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_within_the_bound_and_the_same_on_every_rank(size: int) -> None:
    results = on_ranks(size, sums)
    assert len(results[0]) == len(CODECS) * 3 * len(SIZES)
    assert all(result == results[0] for result in results)


def odd_values(world: World) -> list[list[float]]:
    found = []
    for codec in CODECS.values():
        values = torch.full((2000,), 0.5)
        if world.rank == 0:
            values[3], values[1900] = float("nan"), float("inf")
        values[700], values[1999] = 1e38 / world.size, 1e-8
        values[512:600] = 0.0
        TwoShot(world, world.everyone, codec).start(values).wait()
        found.append(values[[3, 1900, 700, 1999, 550, 0]].tolist())
    return found


@pytest.mark.several
def test_nan_infinity_huge_and_tiny_arrive() -> None:
    for rows in on_ranks(2, odd_values):
        for name, (nan, infinite, huge, _, zero, plain) in zip(CODECS, rows, strict=True):
            assert nan != nan and infinite == float("inf"), name
            assert huge == pytest.approx(1e38, rel=0.01) and zero == 0, name
            if name in ("fp32", "bf16"):  # beside 1e38 the others have nothing left for 0.5
                assert plain == 1.0, name


def fp32_beside_all_reduce(world: World) -> bool:
    """With two ranks there is one order of adding: bit for bit torch's all-reduce; the collectives' way, too."""
    ours, theirs, also = (gradient(world.rank, 30_001, 5) for _ in range(3))
    TwoShot(world, world.everyone, CODECS["fp32"], round_values=4096).start(ours).wait()
    world.all_reduce(theirs)
    by_collectives(world, world.everyone, CODECS["fp32"], also)
    same = torch.equal(ours, theirs) and torch.equal(also, theirs)
    ours, also = (gradient(world.rank, 30_001, 6) for _ in range(2))
    TwoShot(world, world.everyone, CODECS["int8"]).start(ours).wait()
    by_collectives(world, world.everyone, CODECS["int8"], also)
    return same and torch.equal(ours, also)


@pytest.mark.several
def test_fp32_is_torchs_all_reduce_and_both_ways_agree() -> None:
    assert on_ranks(2, fp32_beside_all_reduce) == [True, True]


def owed(world: World) -> list[float]:
    """Sum the same tensor again and again with what was lost added; return how far the mean is from the exact sum."""
    far = []
    for way in ("rounds", "collectives"):
        codec = CODECS["int4"]
        engine = TwoShot(world, world.everyone, codec, round_values=1024 * world.size)
        parts = [gradient(rank, 5000, 7) for rank in range(world.size)]
        exact = sum(part.double() for part in parts)
        assert isinstance(exact, torch.Tensor)
        residual, total = torch.zeros(5000), torch.zeros(5000, dtype=torch.float64)
        for count in range(1, 11):
            values = parts[world.rank].clone()
            if way == "rounds":
                engine.start(values, residual=residual).wait()
            else:
                by_collectives(world, world.everyone, codec, values, residual=residual)
            total += values
            # Whatever was not said yet is in the residuals, all of it.
            left = residual.double()
            world.all_reduce(left)
            torch.testing.assert_close(total + left, exact * count, rtol=0, atol=1e-5 * float(exact.abs().max()))
            if count in (1, 10):
                far.append(float((total / count - exact).norm() / exact.norm()))
        engine.close()
    return far


@pytest.mark.several
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_lost_comes_with_the_next_sum(size: int) -> None:
    for first, last, other_first, other_last in on_ranks(size, owed):
        assert 0.01 < first < 0.2 and last < first / 3
        assert 0.01 < other_first < 0.2 and other_last < other_first / 3


def odd_values_leave_nothing_behind(world: World) -> list[list[float]]:
    codec, found = CODECS["int4"], []
    engine = TwoShot(world, world.everyone, codec)
    residual = torch.zeros(700)
    for first in (float("nan"), float("inf"), 1.0):
        values = torch.ones(700)
        values[5] = values[600] = first
        engine.start(values, residual=residual).wait()
        found.append([values[5].item(), values[600].item(), float(residual.isfinite().all()), values[300].item()])
    return found


@pytest.mark.several
def test_nan_and_infinity_are_not_kept_for_later() -> None:
    for nan, infinite, plain in on_ranks(2, odd_values_leave_nothing_behind):
        assert all(value != value for value in nan[:2]) and nan[2:] == pytest.approx([1.0, 2.0])
        assert infinite == pytest.approx([float("inf"), float("inf"), 1.0, 2.0])
        assert plain == pytest.approx([2.0, 2.0, 1.0, 2.0], rel=0.2)


def lose_a_rank(world: World, how: str) -> tuple[str, str, float]:
    engine = TwoShot(world, world.everyone, CODECS["int8"], round_values=4096)
    values = torch.ones(200_000)
    engine.start(values).wait()
    if world.rank == 1:
        if how == "lost":
            os._exit(3)
        time.sleep(4.0)
        os._exit(3)
    started = time.monotonic()
    under_way = [engine.start(values, awaited="the gradient of w"), engine.start(torch.ones(8), awaited="another")]
    told = []
    for reduction in under_way:
        with pytest.raises(PeerError) as caught:
            reduction.wait()
        told.append(caught.value)
    with pytest.raises(PeerError):
        engine.start(values).wait()
    spent = time.monotonic() - started
    assert "the gradient of w" in str(told[0]) and "rank 1" in str(told[0])
    os._exit(0 if told[0].kind == how and spent < 3.5 else 4)


@pytest.mark.several
@pytest.mark.parametrize("how", ["lost", "late"])
def test_a_lost_or_late_rank_is_named(how: str) -> None:
    outcomes = outcomes_on_ranks(2, lose_a_rank, how, deadline=1.0)
    assert [outcome.code for outcome in outcomes] == [0, 3], outcomes[0].trace or outcomes[0].output


def test_pieces_are_whole_blocks_and_cover_everything() -> None:
    for size in (1, 5, 512, 513, 1024, 10_000):
        for ranks in (1, 2, 3, 7):
            values = torch.arange(size, dtype=torch.float32)
            parts = [part_of(values, owner, ranks, 512) for owner in range(ranks)]
            assert torch.equal(torch.cat(parts), values)
            taken = [part.numel() for part in parts if part.numel()]
            assert all(count % 512 == 0 for count in taken[:-1])
            assert max(part.numel() for part in parts) <= -(-size // ranks) + 511


def test_the_planner_knows_what_messages_take() -> None:
    assert (ROUND_BYTES, ROUNDS) == (4 * ROUND_VALUES, 2 * DEPTH + 2)


def test_what_a_codec_does_not_take_is_refused() -> None:
    engine = TwoShot(World(), World().everyone, CODECS["fp16"])
    for values in (torch.ones(4, dtype=torch.float64), torch.ones(2, 2), torch.ones(8)[::2]):
        with pytest.raises(ValueError, match="contiguous float32"):
            engine.start(values)
    engine.start(torch.ones(4)).wait()  # one rank: nothing to do
