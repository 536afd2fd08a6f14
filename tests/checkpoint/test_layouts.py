"""A checkpoint is loaded under any plan: training goes on as if it had never stopped."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open

import headway
from headway.checkpoint.index import read_index
from headway.collective.world import World
from headway.errors import CheckpointError
from tests.checkpoint.training import Bare, build, files_of, optimizer_of, plan_of, put, train, whole_state
from tests.several.ranks import on_ranks, outcomes_on_ranks

CHANGES = (((2, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (2, 1)))  # copies x stages, before and after
SHARDS = ("none", "optimizer", "parameters", "gradients", "none")  # each is loaded by the next


def check_resumed(world: World, folder: str) -> None:
    """Train 3 + resume 3 == train 6, whichever plans the two halves have."""
    plans = {layout: plan_of(*layout, build()) for layout, _ in CHANGES}
    for kind in ("adamw", "sgd"):
        for number, (before, after) in enumerate(CHANGES):
            model = put(world, plans[before], build())
            optimizer = optimizer_of(kind, model)
            train(model, optimizer, 0, 3)
            alone = before == (1, 1)  # then each process is a whole job
            path = Path(folder) / f"{kind}{number}{world.rank if alone else ''}"
            headway.save(path, model, optimizer, step=3)
            drawn = torch.rand(3), random.random(), numpy.random.rand()
            if after == (1, 1) or alone:
                world.barrier()
            want_losses = train(model, optimizer, 3, 3)
            want = whole_state(model, optimizer)

            if alone:
                path = Path(folder) / f"{kind}{number}0"
            resumed = put(world, plans[after], build(seed=9))
            second = optimizer_of(kind, resumed)
            assert not second.state
            assert headway.load(path, resumed, second) == {"step": 3}
            again = torch.rand(3), random.random(), numpy.random.rand()
            if world.rank == 0:
                assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]
            assert train(resumed, second, 3, 3) == pytest.approx(want_losses, rel=1e-12)
            got = whole_state(resumed, second)
            for name in got.keys() & want.keys():
                torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12, msg=name)
            assert {g["lr"] for g in second.param_groups} == {g["lr"] for g in optimizer.param_groups}
            assert len(got) > 20


@pytest.mark.several
def test_training_goes_on_under_another_plan(tmp_path: Path) -> None:
    on_ranks(2, check_resumed, str(tmp_path))


def check_shards(world: World, folder: str) -> None:
    """The same for copies that share something out: what one loads goes on as what another saved."""
    for kind in ("adamw", "sgd"):
        for number, (before, after) in enumerate(zip(SHARDS, SHARDS[1:], strict=False)):
            model = put(world, plan_of(2, 1, build(), before), build())
            optimizer = optimizer_of(kind, model)
            train(model, optimizer, 0, 2)
            path = Path(folder) / f"{kind}{number}"
            headway.save(path, model, optimizer)
            want_losses = train(model, optimizer, 2, 2)
            want = {k: v for part in world.gather_objects(whole_state(model, optimizer)) for k, v in part.items()}

            resumed = put(world, plan_of(2, 1, build(), after), build(seed=9))
            second = optimizer_of(kind, resumed)
            headway.load(path, resumed, second)
            assert train(resumed, second, 2, 2) == pytest.approx(want_losses, rel=1e-11)
            got = {k: v for part in world.gather_objects(whole_state(resumed, second)) for k, v in part.items()}
            assert got.keys() == want.keys() and len(got) > 30
            for name in got:
                torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-11, msg=f"{after} {name}")
            if before == "parameters" and world.rank == 0:  # no rank has written all of it
                sizes: dict[str, int] = {}
                for key, entry in read_index(path).tensors.items():
                    if key.startswith(("model/", "optimizer/")):
                        sizes[entry.part] = sizes.get(entry.part, 0) + math.prod(entry.shape)
                assert len(sizes) == 2 and max(sizes.values()) < 0.7 * sum(sizes.values())


@pytest.mark.several
def test_what_copies_share_out_is_saved_whole(tmp_path: Path) -> None:
    on_ranks(2, check_shards, str(tmp_path), timeout=110)


def check_parts(world: World, folder: str) -> None:
    """Who writes what, a stage without parameters, and errors that reach every rank."""
    model = put(world, plan_of(1, 2, build()), build())
    optimizer = optimizer_of("adamw", model)
    path = Path(folder) / "staged"
    headway.save(path, model, optimizer)  # before the first step the optimizer has no state
    assert not [key for key in read_index(path).tensors if key.startswith("optimizer/")]
    train(model, optimizer, 0, 1)
    world.barrier()
    headway.save(path, model, optimizer, note="second")
    world.barrier()
    held = {name for name, _ in model.named_parameters()}
    with safe_open(next(path.glob(f"parts-*/{world.rank}.safetensors")), "pt") as part:
        written = {key.removeprefix("model/") for key in part.keys() if key.startswith("model/")}
    assert ("embed.weight" in written) == (world.rank == 0)  # tied: on both stages, written by the first
    assert held - {"embed.weight"} <= written
    assert len(files_of(path)) == 2

    bare = put(world, plan_of(1, 2, Bare().double()), Bare().double())
    assert len(list(bare.named_parameters())) == (2 if world.rank == 0 else 0)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.5)
    train(bare, optimizer, 0, 2)
    headway.save(Path(folder) / "bare", bare, optimizer)
    second = torch.optim.AdamW(bare.parameters(), lr=0.1)
    headway.load(Path(folder) / "bare", bare, second)
    assert second.param_groups[0]["lr"] == pytest.approx(0.5 * 0.81)
    assert len(second.state) == (2 if world.rank == 0 else 0)

    if world.rank == 1:
        optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(CheckpointError, match="option odd of group 0 of the optimizer is a object") as caught:
        headway.save(Path(folder) / "bare", bare, optimizer)
    assert getattr(caught.value, "consequence", False) == (world.rank == 0)
    assert headway.load(Path(folder) / "bare", bare) == {}


@pytest.mark.several
def test_each_rank_writes_its_own(tmp_path: Path) -> None:
    on_ranks(2, check_parts, str(tmp_path))


def leave_while_saving(world: World, folder: str) -> None:
    """Rank 1 dies where its part would be written."""
    model = put(world, plan_of(1, 2, build()), build())
    headway.save(folder, model, optimizer_of("sgd", model), number=1)
    if world.rank == 1:
        raise SystemExit(3)
    headway.save(folder, model, optimizer_of("sgd", model), number=2)


@pytest.mark.several
def test_a_lost_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    outcomes = outcomes_on_ranks(2, leave_while_saving, str(tmp_path), deadline=10.0)
    assert outcomes[0].error is not None and "rank 1" in str(outcomes[0].error)
    assert headway.load(tmp_path, build(seed=5)) == {"number": 1}
