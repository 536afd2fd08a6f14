"""structure: what may change between steps, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from headway.errors import PlanError
from headway.run.structure import Structure


def build() -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model[0].requires_grad_(False)
    return model


def structure(model: nn.Module) -> Structure:
    return Structure.of(model, dict(model.named_parameters()))


def freeze(model: nn.Sequential) -> None:
    model[1].requires_grad_(False)


def freeze_and_thaw(model: nn.Sequential) -> None:
    freeze(model)
    model[1].requires_grad_(True)


@pytest.mark.parametrize("change", [freeze, freeze_and_thaw, lambda model: model.eval(), lambda model: None])
def test_stays_as_it_is(change: Callable[[nn.Sequential], None]) -> None:
    model = build()
    before = structure(model)
    change(model)
    assert before.now() is before


def activation(model: nn.Sequential) -> None:
    model[1][1] = nn.ReLU()


def dropout(model: nn.Sequential) -> None:
    model[1].append(nn.Dropout(0.1))


@pytest.mark.parametrize("change", [activation, dropout, lambda model: model[2].pop(1)])
def test_modules_without_parameters_may_change(change: Callable[[nn.Sequential], None]) -> None:
    model = build()
    before = structure(model)
    change(model)
    after = before.now()
    assert after is not before and after.now() is after


def adapter(model: nn.Sequential) -> None:
    model[1].append(nn.Linear(4, 4))


def own(model: nn.Sequential) -> None:
    model[1].scale = nn.Parameter(torch.ones(()))


def replaced(model: nn.Sequential) -> None:
    model[2][0] = nn.Linear(4, 4)


def put_in(model: nn.Sequential) -> None:
    model[2][0].weight = nn.Parameter(torch.zeros(4, 4))


CHANGES: list[tuple[Callable[[nn.Sequential], object], str]] = [
    (lambda model: model[0].requires_grad_(True), "0.0.weight requires gradients now"),
    (adapter, "1.2.weight, 1.2.bias are new"),
    (own, "1.scale is new"),
    (replaced, "2.0.weight, 2.0.bias are not the same as before"),
    (put_in, "2.0.weight is not the same"),
    (lambda model: model.pop(2), "2.0.weight, 2.0.bias are gone"),
    (lambda model: setattr(model[1][0], "bias", None), "1.0.bias is gone"),
    (lambda model: model.double(), "0.0.weight was float32 [4, 4], and is float64 [4, 4]"),
    (lambda model: prune.l1_unstructured(model[1][0], "weight", 0.5), "1.0.weight_orig is new; 1.0.weight is gone"),
    (lambda model: parametrizations.weight_norm(model[1][0]), "original1 are new; 1.0.weight is gone"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_other_parameters_are_refused_by_name(change: Callable[[nn.Sequential], object], words: str) -> None:
    model = build()
    before = structure(model)
    change(model)
    with pytest.raises(PlanError) as caught:
        before.now()
    assert words in str(caught.value) and "headway.plan" in str(caught.value)


def test_with_slices_names_count_and_freezing_is_refused() -> None:
    """Copies with slices put other objects under a name while a module runs."""
    model = build()
    before = Structure.of(model, dict(model.named_parameters()), sliced=True)
    put_in(model)
    assert before.now() is before
    own(model)
    with pytest.raises(PlanError, match="1.scale is new"):
        before.now()
    del model[1].scale
    freeze(model)
    with pytest.raises(PlanError, match="has changed"):
        before.now()
