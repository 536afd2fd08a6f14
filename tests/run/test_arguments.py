"""What is given to the calls of the face is refused at once, in words, where it is no such thing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import headway
from headway.collective.world import World
from headway.run.decide import optimizer_states
from headway.run.parallel import ParallelModel

X, Y = torch.ones(6, 4), torch.zeros(6, 1)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def plan(model: Any = None, how: Any = loss, batch: Any = (X, Y), **options: Any) -> headway.Plan:
    return headway.plan(nn.Linear(4, 1) if model is None else model, how, batch, **options)


def step(how: Callable[[nn.Module, Any], Any]) -> torch.Tensor:
    model = nn.Linear(4, 1)
    return ParallelModel(model, how, plan(model, how), World()).forward_backward((X, Y))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan("net"), "the model is a str"),
        (lambda: plan(nn.Linear), "the model is the class Linear"),
        (lambda: plan(loss, nn.Linear(4, 1)), "the model is a function"),
        (lambda: plan(how=nn.MSELoss()), "the loss is a MSELoss"),
        (lambda: plan(how=7), "the loss is a int"),
        (lambda: plan(cluster=4), "headway.Cluster or its text"),
        (lambda: plan(optimizer="adam"), "optimizer='adam'"),
        (lambda: plan(fixed=[("pipeline", 1)]), "dict of fields of a plan"),
        (lambda: headway.parallelize(nn.Linear(4, 1), loss, "plan.toml"), "the plan is a str"),
        (lambda: headway.advise(nn.Linear(4, 1), loss, (X, Y), None), "the plan is nothing"),
        (lambda: headway.Shared("mask"), "Shared takes a tensor"),
        (lambda: step(lambda model, batch: loss(model, batch) * 1j), "complex"),
    ],
)
def test_what_is_of_the_wrong_kind_is_a_type_error(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words.replace("(", r"\(")):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan(nn.LazyLinear(1)), ("weight has no shape", "LazyLinear", "call the model once")),
        (lambda: plan(batch=(X[:0], Y[:0])), ("the batch has no samples", "one global batch")),
        (lambda: plan(batch=(X, np.zeros((6, 1)))), ("batch[1] is a numpy.ndarray", "[6, 1]", "torch.as_tensor")),
        (
            lambda: headway.parallelize(nn.Linear(4, 1), loss, headway.Plan(1, 1, "gpipe", 6, 1, 6)),
            ("written by hand", "1 copy of the whole model", "headway.plan(model, loss, batch"),
        ),
        (
            lambda: plan(nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 1)), cluster="2xcpu:16MiB"),
            ("nothing fits", "16 MiB", "a device memory of"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_fact_place_and_remedy(
    call: Callable[[], Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(headway.HeadwayError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "how",
    [
        lambda model, batch: loss(model, batch).detach(),
        torch.no_grad()(loss),
        lambda model, batch: loss(model, batch).long(),
    ],
)
def test_a_loss_that_teaches_nothing_is_refused(how: Callable[[nn.Module, Any], Any]) -> None:
    with pytest.raises(headway.HeadwayError, match="needs no gradient"):
        step(how)


def test_a_model_under_a_plan_is_not_planned_again() -> None:
    model = nn.Linear(4, 1)
    parallel = ParallelModel(model, loss, plan(model), World())
    with pytest.raises(TypeError, match="parallel already"):
        plan(parallel)
    with pytest.raises(TypeError, match="parallel already"):
        headway.parallelize(parallel, loss, parallel.plan)


def test_an_optimizer_may_be_a_class_an_object_or_what_makes_one() -> None:
    sgd = torch.optim.SGD
    assert [optimizer_states(o) for o in (sgd, sgd([X]), partial(sgd, lr=1.0), lambda p: sgd(p))] == [1, 1, 1, 2]


def test_texts_go_with_their_samples() -> None:
    seen: list[Any] = []

    def noting(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((batch["x"][:, 0].tolist(), batch["names"], batch["kind"]))
        return model(batch["x"]).mean()

    model, names = nn.Linear(4, 1), list("abcdef")
    batch = {"x": torch.arange(6.0)[:, None].repeat(1, 4), "names": names, "kind": ["one", "two"]}
    made = headway.plan(model, noting, batch, fixed={"num_micro_batches": 3})
    seen.clear()
    ParallelModel(model, noting, made, World()).forward_backward(batch)
    assert seen == [([i, i + 1.0], names[i : i + 2], ["one", "two"]) for i in (0, 2, 4)]
