"""ShardedReducer on real processes: owners have the gradients of one process, nobody else has any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.collective.shard import ShardedReducer
from headway.collective.world import World
from headway.errors import RankError
from headway.layout.ownership import share_out
from tests.collective.test_reduce import MODES, Net, alone, batches
from tests.several.ranks import on_ranks, outcomes_on_ranks

Found = dict[str, "torch.Tensor | None"]


def owners_of(model: nn.Module, copies: int) -> dict[str, int]:
    sizes = {n: p.numel() * p.element_size() for n, p in model.named_parameters() if p.requires_grad}
    return share_out(sizes, dict.fromkeys(sizes, (0,)), copies)


def reduced(world: World, every: bool) -> dict[str, Found]:
    """Reduce as tests of Reducer do: micro-batches, two calls before a step, parameters that some use."""
    found: dict[str, Found] = {}
    settings = ((1, 1, 1, (), True), (3, 2, 3, (1,), True), (2, 2, 2, tuple(range(world.size)), False))
    for number, (micros, calls, steps, sometimes, set_to_none) in enumerate(settings):
        for mode, direct_bytes in MODES.items():
            model = Net()
            owners = owners_of(model, world.size)
            reducer = ShardedReducer(
                world, world.group(range(world.size)), dict(model.named_parameters()), owners,
                every_backward=every, direct_bytes=direct_bytes, parcel_bytes=4096,
            )  # fmt: skip
            mine = batches(world.size, micros)[world.rank * micros : (world.rank + 1) * micros]
            for step in range(steps):
                if step:
                    model.zero_grad(set_to_none=set_to_none)
                for _ in range(calls):
                    reducer.begin(0.5 / micros, micros)
                    for micro, batch in enumerate(mine):
                        if every or micro == micros - 1:
                            reducer.arm()
                        model(batch, world.rank in sometimes).backward()
                        if every or micro == micros - 1:
                            reducer.complete()
                    reducer.finish(2.0 / world.size)
            table = dict(model.named_parameters())
            assert all(table[name].grad is None for name in owners if owners[name] != world.rank)
            assert set(reducer.owned) == {name for name in owners if owners[name] == world.rank}
            found[f"{number} {mode}"] = {name: table[name].grad for name in reducer.owned}
            assert set(reducer.unused) >= {n for n in reducer.owned if n.startswith("never")}
            reducer.close()
    return found


@pytest.mark.parametrize("every", [False, True], ids=["optimizer", "gradients"])
@pytest.mark.parametrize("size", [2, 3])
def test_owners_have_the_gradients_of_one_process(size: int, every: bool) -> None:
    ranks = on_ranks(size, reduced, every)
    settings: tuple[Any, ...] = ((1, 1, (), True), (3, 2, (1,), True), (2, 2, tuple(range(size)), False))
    for number, (micros, calls, sometimes, set_to_none) in enumerate(settings):
        want = alone(size, micros, calls, sometimes)
        for mode in MODES:
            got = {name: grad for rank in ranks for name, grad in rank[f"{number} {mode}"].items()}
            assert got.keys() == {name for name, p in Net().named_parameters() if p.requires_grad}
            for name, gradient in got.items():
                expected = want[name]
                if expected is None and not set_to_none and gradient is not None:
                    expected = torch.zeros_like(gradient)
                exact = gradient is None or gradient.dtype is torch.float64
                if expected is None or gradient is None:
                    assert gradient is expected, name
                else:
                    rtol = 1e-11 if exact else 1e-5
                    torch.testing.assert_close(gradient, expected, rtol=rtol, atol=rtol / 100, msg=f"{mode} {name}")


def uneven(world: World) -> None:
    """Rank 1 has a backward less, then none; each owner still has the sum. And new values reach everyone."""
    model = nn.Linear(3, 2).double()
    owners = {"weight": 1, "bias": 0}
    reducer = ShardedReducer(
        world, world.group(range(world.size)), dict(model.named_parameters()), owners, every_backward=True
    )
    for mine, total in ((3 - world.rank, 5), (3 * (1 - world.rank), 3), (3, 6)):
        model.zero_grad()
        reducer.begin(backwards=3)
        for _ in range(mine):
            reducer.arm()
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            reducer.complete()
        reducer.finish()
        grad = (model.weight if world.rank == 1 else model.bias).grad
        assert grad is not None and bool((grad == total).all())
        with torch.no_grad():
            (model.weight if world.rank == 1 else model.bias).fill_(total)
        reducer.spread()
        assert bool((model.weight == total).all()) and bool((model.bias == total).all())
    for frozen in (True, False):  # by its owner alone
        model.zero_grad()
        if world.rank == 0:
            model.bias.requires_grad_(not frozen)
        reducer.begin(backwards=1)
        reducer.arm()
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        reducer.finish()
        assert (model.bias.grad is None) == (frozen or world.rank == 1)
        assert (model.weight.grad is None) == (world.rank == 0)
    reducer.close()


def test_copies_may_have_different_numbers_of_micro_batches() -> None:
    on_ranks(2, uneven)


def tied(world: World) -> None:
    """Ranks 0, 1 hold stage 0, ranks 2, 3 stage 1; `word` is on both, `rare` has a gradient on none."""
    data = [world.group([0, 1]), world.group([2, 3])]
    over = [world.group([0, 2]), world.group([1, 3])][world.rank % 2]
    table = {name: nn.Parameter(torch.zeros(3)) for name in ("word", "own", "rare")}
    owners = {"word": 1, "own": 0, "rare": 1}
    shared = {"word": over, "rare": over}
    reducer = ShardedReducer(world, data[world.rank // 2], table, owners, shared=shared)
    for _ in range(2):
        for parameter in table.values():
            parameter.grad = None
        reducer.begin()
        reducer.arm()
        (table["word"].sum() * (world.rank + 1) + table["own"].sum()).backward()
        reducer.finish(0.5)
        got = {name: None if p.grad is None else p.grad.tolist() for name, p in table.items()}
        assert got == {
            "word": [5.0] * 3 if world.rank % 2 else None, "own": None if world.rank % 2 else [1.0] * 3, "rare": None,
        }  # fmt: skip
    reducer.close()


def test_tied_parameters_are_summed_over_their_owners() -> None:
    on_ranks(4, tied)


def disagree(world: World) -> None:
    owners = {"weight": world.rank, "bias": 0}
    ShardedReducer(world, world.group([0, 1]), dict(nn.Linear(2, 2).named_parameters()), owners)


def test_ranks_that_know_other_owners_are_refused() -> None:
    for outcome in outcomes_on_ranks(2, disagree):
        assert isinstance(outcome.error, RankError) and "reduce differently" in str(outcome.error)
