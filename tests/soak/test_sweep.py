"""The sweep itself, on a few cases: many more are run by `make soak`."""

from __future__ import annotations

import random

import pytest
import torch

from headway.run.microbatch import cut
from tests.soak.cases import case_of
from tests.soak.failures import look
from tests.soak.programs import Program, batch_of, build, loss_of, recipe
from tests.soak.sweep import sweep
from tests.soak.training import SINGLE, Compared, leaves

SEEDS = (1, 4, 7)


def test_a_case_follows_from_one_integer() -> None:
    assert case_of(7, 4) == case_of(7, 4) != case_of(8, 4) and recipe(7) == recipe(7) != recipe(8)
    first, second = (leaves(batch_of(recipe(1), 5, 2)) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor))


def test_every_order_can_be_drawn() -> None:
    known = {name.removeprefix("do_") for name in vars(Program) if name.startswith("do_")}
    assert known == frozenset().union(*(recipe(seed).names for seed in range(300)))


def test_programs_run_in_plain_torch_but_for_a_few() -> None:
    failed = 0
    for seed in random.Random(0).sample(range(1000), 20):
        made = recipe(seed)
        try:
            loss_of(made)(build(made), cut(batch_of(made, 4, 0), 0, 4))
        except RuntimeError:
            failed += 1
    assert failed <= 4


def test_differences_are_seen() -> None:
    compared = Compared(1e-9)
    compared.number("loss", 1.0 + 1e-8, 1.0)
    compared.tensors("weight", torch.ones(2), None)
    compared.tensors("bias", torch.ones(2), torch.ones(3))
    assert len(compared.found) == 3 and SINGLE > compared.limit


@pytest.mark.several
@pytest.mark.timeout(200)
def test_some_cases_equal_one_process() -> None:
    found = sweep(2, SEEDS, tell=False)
    assert {seed: words for seed, (verdict, words) in found.items() if verdict != "same"} == {}


@pytest.mark.several
def test_a_failure_ends_all_ranks_and_is_named() -> None:
    assert look(0, 2) == []
