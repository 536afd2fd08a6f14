"""Micro-batches: cutting, weighing and joining, against plain slicing and arithmetic."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import BatchError
from headway.planner.plan import micro_batches, shares
from headway.run.microbatch import Mean, Shared, cut, join, num_samples, num_tokens, offsets, read_loss


@dataclass
class Pair:
    """A batch of a user's own type."""

    x: torch.Tensor
    name: str


def test_every_leaf_is_cut_and_others_are_left() -> None:
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    batch = {"x": x, "more": [y, ("text", 3)], "mask": Shared(torch.ones(9)), "pair": Pair(y, "p")}
    part = cut(batch, 1, 4)
    assert part["x"].equal(x[1:4]) and part["more"][0].equal(y[1:4]) and part["pair"].x.equal(y[1:4])
    assert part["more"][1] == ("text", 3) and part["pair"].name == "p"
    assert part["mask"].equal(torch.ones(9)), "a shared leaf arrives as its tensor"
    assert isinstance(cut(batch, 1, 4, keep_shared=True)["mask"], Shared)
    assert part["x"].data_ptr() == x[1:].data_ptr(), "views, not copies"


def test_mappings_of_other_kinds_stay_what_they_are() -> None:
    batch = UserDict({"x": torch.arange(4)})
    part = cut(batch, 2, 4)
    assert type(part) is UserDict and part["x"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.ones(6, 2), torch.ones(6), torch.ones(5)), "batch[2] has 5 rows"),
        ({"x": torch.ones(6), "y": {"z": torch.ones(7, 2)}, "w": torch.ones(6)}, "batch['y']['z'] has 7 rows"),
        ((torch.ones(6), torch.tensor(1.0)), "batch[1] has no dim 0"),
    ],
)
def test_a_leaf_of_another_length_is_refused_by_name(batch: Any, named: str) -> None:
    with pytest.raises(BatchError) as refused:
        num_samples(batch)
    assert named in str(refused.value) and "headway.Shared(batch" in str(refused.value)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(BatchError, match="no tensor with samples"):
        num_samples({"text": "abc"})


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 12))
def test_shares_and_micro_batches_cover_every_sample_once(total: int, copies: int, count: int) -> None:
    batch = torch.arange(total)
    seen = []
    for start, stop in offsets(shares(total, copies)):
        part = cut(batch, start, stop)
        if len(part) < count:
            continue
        sizes = micro_batches(len(part), count)
        assert len(sizes) == count and min(sizes) >= 1
        pieces = [cut(part, *bounds) for bounds in offsets(sizes)]
        assert join(pieces, sizes).equal(part)
        seen += part.tolist()
    if total // copies >= count:
        assert seen == list(range(total))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 1000))
def test_losses_add_up_to_the_loss_of_the_whole(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randn(sum(sizes), dtype=torch.float64)
    weights = torch.randint(1, 5, (sum(sizes),))
    plain, weighed = [], []
    for start, stop in offsets(sizes):
        part, weight = values[start:stop], weights[start:stop]
        plain.append(read_loss(part.mean(), stop - start))
        weighed.append(read_loss(Mean((part * weight).sum(), weight.sum()), stop - start))
    for parts, want in ((plain, values.mean()), (weighed, (values * weights).sum() / weights.sum())):
        got = sum(float(p.total) for p in parts) / sum(p.count for p in parts)
        assert got == pytest.approx(float(want), abs=1e-12)


def test_metrics_come_with_a_loss() -> None:
    parts = read_loss((torch.tensor(2.0), {"accuracy": torch.tensor(0.5), "bits": Mean(torch.tensor(6.0), 3)}), 4)
    assert float(parts.total) == 8.0 and parts.count == 4.0
    assert parts.metrics == {"accuracy": (2.0, 4.0), "bits": (6.0, 3.0)}


@pytest.mark.parametrize("result", [None, "0.3", torch.ones(4), torch.ones(1), (torch.ones(()), 3), 1.5])
def test_what_is_no_loss_is_refused(result: Any) -> None:
    with pytest.raises(TypeError, match="loss function returned"):
        read_loss(result, 4)


def test_outputs_without_a_row_for_each_sample_are_taken_once() -> None:
    parts = [{"y": torch.ones(2, 3), "scale": torch.tensor(5.0)}, {"y": torch.zeros(1, 3), "scale": torch.tensor(6.0)}]
    joined = join(parts, [2, 1])
    assert joined["y"].shape == (3, 3) and float(joined["scale"]) == 5.0


def test_tokens_are_counted_in_batches_of_integers() -> None:
    assert num_tokens((torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2)), 10) == 70
    assert num_tokens(torch.zeros(2, 7), 10) is None


def test_writing_one_micro_batch_does_not_spoil_what_is_kept_of_another() -> None:
    layer, batch = torch.nn.Linear(3, 3), torch.ones(4, 3)
    losses = [layer(cut(batch, start, start + 2).sub_(0.5)).sum() for start in (0, 2)]
    for value in losses:
        value.backward()
    assert torch.equal(batch, torch.full((4, 3), 0.5))
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, torch.full((3, 3), 2.0))
