"""Save and load in one process: what is kept, what is refused, and what an interruption leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headway
from headway.checkpoint import index as index_file
from headway.checkpoint import save as saving
from headway.checkpoint.index import INDEX, read_index
from headway.checkpoint.values import join_values, split_values
from headway.collective.world import World
from headway.errors import CheckpointError
from tests.checkpoint.training import batches, build, files_of, loss, optimizer_of, plan_of, put, train


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(model, batches(number, 1)[0]).backward()
    optimizer.step()


def same_optimizer(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_undistributed_script_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    model = build()
    optimizer = optimizer_of(kind, model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4], gamma=0.5)
    for number in range(2):
        step(model, optimizer, number)
        schedule.step()
    headway.save(tmp_path / "out", model, optimizer, step=2, schedule=schedule.state_dict())
    for number in range(2, 5):
        step(model, optimizer, number)
        schedule.step()

    again = build(seed=3)
    second = optimizer_of(kind, again)
    other = torch.optim.lr_scheduler.MultiStepLR(second, [1, 4], gamma=0.5)
    extra = headway.load(tmp_path / "out", again, second)
    other.load_state_dict(extra["schedule"])
    for number in range(extra["step"], 5):
        step(again, second, number)
        other.step()
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    same_optimizer(second, optimizer)
    assert other.get_last_lr() == schedule.get_last_lr()


def test_a_script_without_headway_takes_what_a_plan_left(tmp_path: Path) -> None:
    model = put(World(), plan_of(1, 1, build()), build())
    optimizer = optimizer_of("adamw", model)
    train(model, optimizer, 0, 2)
    headway.save(tmp_path, model, optimizer)
    plain = build(seed=4)
    second = optimizer_of("adamw", plain)
    headway.load(tmp_path, plain, second)
    torch.testing.assert_close(plain.state_dict(), model.state_dict(), rtol=0, atol=0)
    same_optimizer(second, optimizer)
    assert plain.head.weight is plain.embed.weight
    headway.save(tmp_path, plain, second)  # and back
    headway.load(tmp_path, model, optimizer)
    same_optimizer(second, optimizer)


def test_options_of_tensors_and_how_to_compute_stay(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    headway.save(tmp_path, model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), betas=(0.5, 0.75)))
    other = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    headway.load(tmp_path, model, other)
    group = other.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor) and float(group["lr"]) == 0.25
    assert group["betas"] == (0.5, 0.75) and group["foreach"] is False


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.Adagrad(ps, lr=0.1),
        lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.NAdam(ps, lr=0.1),
    ],
    ids=["Adagrad", "RMSprop", "AMSGrad", "SGD", "NAdam"],
)
def test_optimizers(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, again = build(), build()
    first, second = make(model.parameters()), make(again.parameters())
    step(model, first, 0)
    headway.save(tmp_path, model, first)
    headway.load(tmp_path, again, second)
    same_optimizer(second, first)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$tensor", "$tuple"]), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(plain_values)
def test_extra_comes_back_as_it_was_given(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert join_values(split_values({"x": [value, torch.ones(2)]}, "x", tensors, "t"), tensors.__getitem__) == {
        "x": [value, tensors["t0"]]
    }


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"note": {"a": [1, object()]}}, r"note\['a'\]\[1\] is a object"),
        ({"seen": {1, 2}}, "seen is a set"),
        ({"table": {(1, 2): 3}}, "table is a dict whose keys"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "x is of complex64"),
        ({"x": torch.empty(2, device="meta")}, "x has no values"),
    ],
)
def test_extra_that_is_not_plain_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        headway.save(tmp_path / "out", nn.Linear(2, 2), **extra)
    assert not (tmp_path / "out").exists()


class Stateful(nn.Linear):
    """A module with a state of its own kind."""

    def get_extra_state(self) -> str:
        """Return something that is no tensor."""
        return "mine"

    def set_extra_state(self, state: str) -> None:
        """Take it back."""


def test_state_that_is_not_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="_extra_state, which is neither a parameter nor a buffer"):
        headway.save(tmp_path / "out", Stateful(2, 2))


def counting() -> nn.Module:
    model = build()
    model.scale = torch.tensor(3)
    return model


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: build(hidden=6),
            r"embed.weight is \[11, 8\] in the checkpoint, \[11, 6\] in the model; .*more differences",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "0.weight is not in the checkpoint; 0.bias is not in the checkpoint"),
        (counting, "scale is float64 in the checkpoint, int64 in the model"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, make: Callable[[], nn.Module], what: str) -> None:
    headway.save(tmp_path, build())
    with pytest.raises(CheckpointError, match=what):
        headway.load(tmp_path, make())


def test_ties_are_part_of_the_model(tmp_path: Path) -> None:
    headway.save(tmp_path, build(tied=False))
    with pytest.raises(CheckpointError, match="embed.weight and head.weight are one tensor in the model"):
        headway.load(tmp_path, build())
    headway.save(tmp_path, build())
    apart = build(tied=False, seed=1)
    headway.load(tmp_path, apart)
    assert torch.equal(apart.head.weight, build().embed.weight)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = build()
    first = optimizer_of("adamw", model)
    step(model, first, 0)
    headway.save(tmp_path / "a", model, first)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, first, 1)
    moved = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    fewer = [{"params": [p for p in trained if (p.dim() > 1) == matrices]} for matrices in (True, False)]
    one = [{"params": list(model.parameters()), "lr": 0.1}]
    for second, what in (
        (torch.optim.SGD(model.parameters(), lr=0.1), "has the state of AdamW, the optimizer here is SGD"),
        (torch.optim.AdamW(fewer), "the saved optimizer also has frozen.weight, frozen.bias"),
        (torch.optim.AdamW(one), "are in one group here, and were saved with other options: lr 0.02 and 0.03"),
        (torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(5))]), "a parameter that is not the model's"),
    ):
        with pytest.raises(CheckpointError, match=what):
            headway.load(tmp_path / "a", model, second)
        torch.testing.assert_close(model.state_dict(), moved, rtol=0, atol=0)  # nothing was changed
    headway.load(tmp_path / "a", model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    headway.save(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        headway.load(tmp_path / "b", model, first)
    small = torch.optim.AdamW(trained)
    headway.save(tmp_path / "c", model, small)
    with pytest.raises(CheckpointError, match="the saved optimizer does not have frozen.weight, frozen.bias"):
        headway.load(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))


def truncate(directory: Path) -> None:
    part = next(directory.glob("parts-*/*"))
    os.truncate(part, part.stat().st_size - 8)


def flip(directory: Path) -> None:
    part = next(directory.glob("parts-*/*"))
    data = bytearray(part.read_bytes())
    data[-len(data) // 2] ^= 1
    part.write_bytes(data)


def wreck_header(directory: Path) -> None:
    part = next(directory.glob("parts-*/*"))
    data = bytearray(part.read_bytes())
    data[9:40] = b"x" * 31
    part.write_bytes(data)


def cut_index(directory: Path) -> None:
    path = directory / INDEX
    path.write_text(path.read_text()[:-50])


def newer(directory: Path) -> None:
    path = directory / INDEX
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (truncate, "damaged: one of its 1 parts has [0-9,]+ bytes, [0-9,]+ were written"),
        (lambda d: next(d.glob("parts-*/*")).unlink(), "damaged: one of its 1 parts is missing"),
        (flip, r"damaged: .* is not what was written \(CRC-32\)"),
        (wreck_header, "damaged: Error while deserializing header"),
        (cut_index, "the index of the checkpoint cannot be read"),
        (newer, "has format 2, this Headway reads format 1"),
        (lambda d: (d / INDEX).write_text("[]"), "the index of the checkpoint cannot be read"),
        (lambda d: (d / INDEX).unlink(), "this is a save that was never completed"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, harm: Callable[[Path], object], what: str) -> None:
    headway.save(tmp_path / "out", build())
    harm(tmp_path / "out")
    with pytest.raises(CheckpointError, match=what) as caught:
        headway.load(tmp_path / "out", build())
    assert str(tmp_path / "out") in str(caught.value.place)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    headway.save(tmp_path / "run" / "last", build())
    with pytest.raises(CheckpointError, match=r"no such checkpoint(.|\n)*a checkpoint is here: .*last"):
        headway.load(tmp_path / "run" / "lost", build())
    with pytest.raises(CheckpointError, match=r"it has no checkpoint.json(.|\n)*a checkpoint is here: .*last"):
        headway.load(tmp_path / "run", build())
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="a checkpoint is a directory, and this is a file"):
        headway.save(tmp_path / "file", build())
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="there is a checkpoint.json that is not a checkpoint's"):
        headway.save(tmp_path, build())


class Interrupted(BaseException):
    """What a kill would be."""


@pytest.mark.parametrize("where", ["write_part", "write_index", "replace"])
@pytest.mark.parametrize("kind", [Interrupted, OSError])
def test_an_interrupted_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
) -> None:
    model = build()
    headway.save(tmp_path, model, number=1)
    (tmp_path / "notes.txt").write_text("the user's own")
    headway.save(tmp_path / "parts-00001000", model)  # so is this, whatever its name

    def fail(*args: Any) -> None:
        if where == "write_part":
            (tmp_path / args[1]).parent.mkdir()
            (tmp_path / args[1]).write_text("half")
        raise kind(28, "No space left on device", str(args[0]))

    with monkeypatch.context() as patch:
        patch.setattr(index_file.os if where == "replace" else saving, where, fail)
        with pytest.raises(Interrupted if kind is Interrupted else CheckpointError, match="No space left"):
            headway.save(tmp_path, model, number=2)
    assert headway.load(tmp_path, model) == {"number": 1}
    headway.save(tmp_path, model, number=3)
    assert headway.load(tmp_path, model) == {"number": 3}
    assert files_of(tmp_path) == sorted([INDEX, "notes.txt", "parts-00001000", f"parts-{read_index(tmp_path).save}"])
