"""Low-rank sums on real processes: exact where the rank suffices, finite for any gradient, vectors always exact."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import nn

from headway.collective.bucket import Slot, make_slot
from headway.collective.low_rank import LowRank, reduce_bucket
from headway.collective.reduce import Reducer
from headway.collective.two_shot import Reduction
from headway.collective.world import PeerError, World
from headway.planner.wire import factors, low_rank, low_rank_count
from tests.several.ranks import SOON, on_ranks, outcomes_on_ranks

SHAPES = {"matrix": (40, 30), "kernel": (16, 4, 3, 3), "vector": (33,), "thin": (50, 2)}


def bucket() -> tuple[list[Slot], int]:
    """Lay the parameters side by side, the kernel with its channels last in memory."""
    slots, start = [], 0
    for number, (name, shape) in enumerate(SHAPES.items()):
        parameter = nn.Parameter(torch.zeros(shape))
        if name == "kernel":
            parameter = nn.Parameter(torch.zeros(shape).to(memory_format=torch.channels_last))
        slots.append(make_slot(name, parameter, number, None))
        slots[-1].start = start
        start += parameter.numel() + 7
    return slots, start


def filled(slots: list[Slot], size: int, seed: int, scale: float = 1.0, rank: int | None = None) -> torch.Tensor:
    """Fill a bucket with normal values, or with matrices of a rank."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.zeros(size)
    for slot in slots:
        place = slot.place_in(values)
        random = torch.randn(place.shape, generator=generator)
        if rank is not None and random.dim() > 1:
            flat = random.flatten(1)
            random = (flat[:, :rank] @ flat[:rank]).view(place.shape)
        place.copy_(random * scale)
    return values


def within_the_rank(world: World) -> float:
    """Sums of matrices whose ranks add up to no more than the factors' arrive as they are, at any size."""
    worst = 0.0
    slots, size = bucket()
    for scale in (1.0, 1e-30, 1e30):
        engine = LowRank(world, world.everyone, 4)
        residual = torch.zeros(size)
        for step in range(3):
            values = filled(slots, size, 10 * step + world.rank, scale, rank=1)
            exact = values.clone()
            world.all_reduce(exact)
            engine.start(values, residual=residual, slots=slots).wait()
            for slot in slots:
                got, want = slot.place_in(values), slot.place_in(exact)
                worst = max(worst, float((got - want).abs().max() / want.abs().max()))
                if slot.name in ("vector", "thin"):
                    assert torch.equal(got, want)
        engine.close()
    return worst


def odd_gradients(world: World) -> dict[str, tuple[float, ...]]:
    """Zeros, one direction only, NaN, infinity, subnormal numbers, one after the other; then plain ones again."""
    slots, size = bucket()
    engine, residual = LowRank(world, world.everyone, 4), torch.zeros(size)
    found = {}
    steps = {"zero": 0.0, "one": 1.0, "nan": math.nan, "infinite": math.inf, "subnormal": 1e-41, "plain": 1.0}
    for number, (name, value) in enumerate(steps.items()):
        values = torch.zeros(size)
        if name == "plain":
            values = filled(slots, size, world.rank)
        elif world.rank == 0 or name != "nan":
            for slot in slots:
                slot.place_in(values)[number % 2] = value
        engine.start(values, residual=residual, slots=slots).wait()
        places = [slot.place_in(values) for slot in slots]
        found[name] = tuple(float(place.abs().max()) for place in places)
        assert bool(residual.isfinite().all())
        world.barrier()
    assert all(bool(basis.isfinite().all()) for basis in engine.bases.values())
    return found


def several(world: World) -> tuple[float, dict[str, tuple[float, ...]]]:
    return within_the_rank(world), odd_gradients(world)


@pytest.mark.several
@pytest.mark.parametrize("size", [2])
def test_sums_are_exact_within_the_rank_and_finite_whatever_comes(size: int) -> None:
    for worst, found in on_ranks(size, several):
        assert worst < 1e-4
        assert found["zero"] == (0.0,) * 4
        assert found["one"] == pytest.approx((2.0,) * 4)
        assert all(math.isnan(value) for value in found["nan"]) and not any(map(math.isfinite, found["infinite"]))
        assert found["subnormal"] == pytest.approx((2e-41,) * 4, rel=0.5)
        assert all(0.5 < value < 20 for value in found["plain"])


def test_what_is_left_out_gets_smaller_and_comes_later() -> None:
    """One process, by the function that the thread calls: a constant gradient, said in full after some steps."""
    slots, size = bucket()
    gradient = filled(slots, size, 1)
    residual, total = torch.zeros(size), torch.zeros(size)
    bases: dict[str, torch.Tensor] = {}
    far = []
    for step in range(1, 101):
        values = gradient.clone()
        before = residual.clone()
        reduction = Reduction(values, "a sum", residual)
        # Two ranks with the same gradient: each sum is twice the message.
        reduce_bucket(reduction, slots, 2, bases, lambda message, _: message.mul_(2.0))
        for slot in slots:  # a projection: never more than there was
            left, there = slot.place_in(residual), slot.place_in(gradient) + slot.place_in(before)
            assert left.norm() <= there.norm() * (1 + 1e-5)
        total += values
        far.append(float((total / step - 2 * gradient).norm() / (2 * gradient).norm()))
    assert far[0] > 0.6 and far[-1] < 0.2
    assert far[-1] < 0.6 * far[40] < 0.6 * far[10]


def test_names_and_shapes() -> None:
    assert [low_rank(name) for name in ("powersgd", "powersgd:8", "powersgd:0", "powersgd:x", "fp16")] == [
        4, 8, None, None, None,
    ]  # fmt: skip
    assert factors((300, 100), 4) == (300, 100, 4) and factors((16, 4, 3, 3), 1) == (16, 36, 1)
    assert factors((300,), 4) is None and factors((8, 8), 4) is None and factors((0, 8), 1) is None
    assert low_rank_count((300, 100), 4) == 1600 and low_rank_count((7,), 4) == 7


def dies(world: World) -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
    reducer = Reducer(world, world.everyone, dict(model.named_parameters()), direct_bytes=0, codec="powersgd")
    for step in range(100):
        reducer.begin()
        reducer.arm()
        if world.rank == 1 and step == 3:
            model[1].weight.register_post_accumulate_grad_hook(lambda _: os._exit(5))
        model(torch.ones(1, 200)).sum().backward()
        reducer.finish()


@pytest.mark.several
def test_a_rank_that_dies_is_named() -> None:
    outcome, dead = outcomes_on_ranks(2, dies, deadline=20.0)
    assert dead.code == 5 and isinstance(outcome.error, PeerError), outcome.trace
    assert outcome.error.peers == (1,) and "gradients of" in str(outcome.error)
    assert outcome.seconds - dead.seconds < SOON
