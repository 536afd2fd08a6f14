"""Same training: losses, norms and parameters under every plan are those of a plain loop in one process."""

from __future__ import annotations

from typing import Any

import pytest

import headway
from headway.collective.world import World
from headway.schedule.catalogue import CATALOGUE
from tests.numerics.training import GLOBAL_BATCH, Case, Trained, difference, plainly, under_plan
from tests.several.ranks import on_ranks

LAYOUTS = ((2, 1), (3, 1), (1, 2), (1, 3), (2, 2))  # copies x stages
COUNTS = (1, 4, 5)
SCHEDULES = ("gpipe", "one_f_one_b")
OTHERS = tuple(name for name in CATALOGUE if name not in SCHEDULES)


def cases(data: int, pipeline: int) -> list[Case]:
    """List what is trained under one layout. A copy's samples bound its micro-batches (12 / 3 = 4 for 3 copies)."""
    found = []
    for count in COUNTS:
        if count > GLOBAL_BATCH // data:
            continue
        for schedule in SCHEDULES:
            fixed = (("data", data), ("pipeline", pipeline), ("num_micro_batches", count), ("schedule", schedule))
            for model in ("gpt", "digits"):
                found.append(Case(model, "adamw", fixed))
                if schedule == "one_f_one_b":
                    found.append(Case(model, "sgd", fixed))
            found.append(Case("gpt", "adamw", fixed, padded=True, seed=count))
    return found


def train_all(world: World, todo: list[Case]) -> list[tuple[Trained, tuple[int, ...]]] | None:
    """Train all cases on these ranks; rank 0 tells."""
    known: dict[Any, headway.Plan] = {}
    results = [under_plan(world, case, known) for case in todo]
    return results if world.rank == 0 else None


def cases_of_others(data: int, pipeline: int) -> list[Case]:
    """List what is trained under schedules with several stages a rank, or a backward in two parts."""
    found = []
    for name in OTHERS:
        for count in (2, 5) if data == 1 else (3,):
            fixed = (("data", data), ("pipeline", pipeline), ("num_micro_batches", count), ("schedule", name))
            found.append(Case("gpt", "adamw", fixed, padded=True, seed=count))
            if count != 2:
                found.append(Case("digits", "sgd", fixed))
    return found


@pytest.mark.several
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("data", "pipeline"), LAYOUTS, ids=lambda n: str(n))
def test_training_under_a_plan_equals_one_process(data: int, pipeline: int) -> None:
    agree(data, pipeline, cases(data, pipeline))


@pytest.mark.several
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("data", "pipeline"), [(1, 2), (1, 3), (2, 2)], ids=lambda n: str(n))
def test_training_under_every_schedule_equals_one_process(data: int, pipeline: int) -> None:
    agree(data, pipeline, cases_of_others(data, pipeline))


def agree(data: int, pipeline: int, todo: list[Case]) -> None:
    """Train all cases under their plans and in one process, and compare."""
    results = on_ranks(data * pipeline, train_all, todo, timeout=280)[0]
    plain: dict[tuple[object, ...], Trained] = {}
    wrong = []
    for case, (got, sizes) in zip(todo, results, strict=True):
        assert sum(sizes) == GLOBAL_BATCH
        # batch norm sees micro-batches, so one process must see the same ones; others see the whole batch
        if case.model == "gpt":
            sizes = (GLOBAL_BATCH,)
        key = (case.model, case.optimizer, case.padded, case.seed, sizes)
        if key not in plain:
            plain[key] = plainly(case, sizes)
        apart, what = difference(plain[key], got)
        if not apart <= 1e-9:
            wrong.append(f"{case}: {what} differs by {apart:.1e}")
    assert not wrong, "\n".join(wrong)
