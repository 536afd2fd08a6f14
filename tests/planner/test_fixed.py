"""fixed=: every decision is used as given, or refused with fact, place and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.cost.cluster import Cluster
from headway.errors import PlanError
from headway.planner.fixed import KEYS
from headway.planner.plan import Plan, micro_batches, shares
from headway.planner.search import search
from headway.schedule.action import Action, Kind, Schedule
from headway.schedule.catalogue import build
from headway.schedule.exchange import read_rows
from headway.schedule.lower import lower
from tests.cost.graphs import chain, times


def plan(size: int = 4, batch: int = 12, **fixed: object) -> Plan:
    return search(lambda n: chain(n, (64,) * 7), times, Cluster(f"{size}xcpu:1GiB"), global_batch=batch, fixed=fixed)


@pytest.mark.parametrize(
    "fixed",
    [
        {"data": 1}, {"data": 2}, {"data": 4}, {"pipeline": 1}, {"pipeline": 2}, {"pipeline": 4},
        {"data": 2, "pipeline": 2}, {"data": 1, "pipeline": 1}, {"schedule": "gpipe"},
        {"schedule": "one_f_one_b", "pipeline": 2}, {"schedule": "gpipe", "pipeline": 2}, {"micro_batch": 1},
        {"micro_batch": 3}, {"num_micro_batches": 1}, {"num_micro_batches": 3},
        {"pipeline": 4, "num_micro_batches": 12},
        {"data": 2, "micro_batch": 4, "num_micro_batches": 2}, {"cuts": ("cut.2",)}, {"cuts": ("cut.1", "cut.5")},
        {"cuts": ()}, {"pipeline": 3, "cuts": ("cut.2", "cut.3")}, {"chunks": 1}, {"shard": "none"}, {"tensor": 1},
        {"shard": "optimizer", "data": 4}, {"shard": "gradients", "data": 2, "pipeline": 2}, {"shard": "parameters"},
        {"shard": "optimizer", "chunks": 2, "pipeline": 2}, {"shard": "gradients", "codec": "fp16"},
        {"recompute": "none"}, {"precision": "float32"}, {"codec": "fp32"},
        {"schedule": "backward_first", "pipeline": 2}, {"schedule": "zero_bubble", "pipeline": 4},
        {"schedule": "searched", "pipeline": 2}, {"schedule": "searched", "pipeline": 2, "chunks": 2},
        {"schedule": "zero_bubble_h2", "pipeline": 2}, {"schedule": "zero_bubble_v"}, {"schedule": "interleaved"},
        {"schedule": "breadth_first", "chunks": 3, "pipeline": 2}, {"chunks": 2}, {"chunks": 3, "pipeline": 2},
        {"schedule": "interleaved", "cuts": ("cut.1", "cut.2", "cut.4")},
        {"cuts": ("cut.1", "cut.2", "cut.4", "cut.5", "cut.6"), "pipeline": 3},
        {"schedule": "zero_bubble_v", "data": 4}, {"schedule": "interleaved", "pipeline": 1},
        {"codec": "fp16"}, {"codec": "bf16"}, {"codec": "int8"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_fixed_is_used(fixed: dict[str, object]) -> None:
    result = plan(**fixed)
    assert {name: getattr(result, name) for name in fixed} == fixed
    assert result.split is not None and result.split.num_stages == result.pipeline * result.chunks
    copies = shares(result.global_batch, result.data)
    assert sum(sum(micro_batches(share, result.num_micro_batches, result.micro_batch)) for share in copies) == 12


def _action(cell: str) -> Action:
    return Action(Kind(cell[1]), int(cell[0]), int(cell[2]))


def test_a_schedule_may_be_given_itself() -> None:
    mine = replace(build("interleaved", 2, 3, 2), name="mine")
    lowered = lower(mine, [(0, 1), (1, 2), (2, 3)])
    for given in (mine, lowered):
        result = plan(schedule=given)
        assert (result.schedule, result.pipeline, result.chunks, result.num_micro_batches) == ("mine", 2, 2, 3)
        assert result.order_for(3).ranks == mine.ranks
        assert plan(schedule=given, pipeline=2, data=2).data == 2
    with pytest.raises(PlanError, match="schedule 'mine' is for pipeline=2, not 4"):
        plan(schedule=mine, pipeline=4)
    with pytest.raises(PlanError, match="schedule 'mine' is for num_micro_batches=3, not 2"):
        plan(schedule=mine, num_micro_batches=2)
    uneven = Schedule("uneven", 3, 1, (mine.ranks[0][:0], ()), (0, 1, 1))
    with pytest.raises(PlanError, match="'uneven': rank 0 does nothing"):
        plan(schedule=uneven)
    for stuck in (("0F0,0B0", "1B0,1F0"), ("0F1,0B1,0F0,0B0", "1F0,1B0,1F1,1B1")):
        ranks = tuple(tuple(_action(cell) for cell in row.split(",")) for row in stuck)
        with pytest.raises(PlanError, match="'stuck' can never finish"):
            plan(schedule=Schedule("stuck", 2, len(ranks[0]) // 2, ranks, (0, 1)))
    orders = ("0F0,1F0,1B0,0B0", "2F0,2B0")
    with pytest.raises(PlanError, match="ranks of schedule 'imported' hold 1 to 2 stages"):
        plan(schedule=read_rows(orders))


def test_a_schedule_is_searched_when_asked_for(tmp_path: Path) -> None:
    result = plan(schedule="searched", pipeline=4)
    assert result.schedule == "searched" and len(result.order) == 4
    best = min(
        plan(schedule=name, pipeline=4).seconds or 0.0 for name in ("one_f_one_b", "zero_bubble", "zero_bubble_h2")
    )
    assert result.seconds is not None and result.seconds <= best * (1 + 1e-3)
    assert any(reason.startswith("the order is searched") for reason in result.reasons)
    result.save(tmp_path / "plan.toml")
    again = Plan.load(tmp_path / "plan.toml")
    assert again == result and again.lowered == result.lowered


def test_a_list_of_cuts_or_one_name_will_do() -> None:
    assert plan(cuts=["cut.2"]).cuts == ("cut.2",) == plan(cuts="cut.2").cuts


@pytest.mark.parametrize(
    ("fixed", "fact"),
    [
        ({"pipelines": 2}, "'pipelines' is no decision"),
        ({"pipeline": 9}, "pipeline=9 needs 9 processes, there are 4 processes"),
        ({"data": 3, "pipeline": 2}, "data=3 and pipeline=2 need 6 processes, there are 4 processes"),
        ({"data": 0}, "data=0 is not a whole number from 1 up"),
        ({"data": True}, "data=True is not"),
        ({"pipeline": 2.0}, "pipeline=2.0 is not"),
        ({"micro_batch": "4"}, "micro_batch='4' is not"),
        ({"schedule": "fast"}, "no schedule called 'fast'"),
        ({"schedule": "interleaved", "chunks": 1}, "interleaved has 2 stages or more on each rank, chunks=1"),
        ({"schedule": "zero_bubble", "chunks": 2}, "zero_bubble has 1 stage on each rank, chunks=2"),
        ({"schedule": "zero_bubble_v", "chunks": 3}, "zero_bubble_v has 2 stages on each rank, chunks=3"),
        ({"chunks": 8, "pipeline": 1}, "at most 7 stages, pipeline=1 with chunks=8"),
        ({"chunks": 4, "pipeline": 2}, "at most 7 stages, pipeline=2 with chunks=4"),
        ({"chunks": 2, "cuts": ["cut.2", "cut.4"]}, "2 cuts make 3 stages, pipeline=1 with 2 stages on each rank"),
        ({"schedule": "one_f_one_b", "pipeline": 1, "cuts": ["cut.2"]}, "1 cut makes 2 stages, pipeline=1 asks for 1"),
        ({"schedule": "one_f_one_b", "chunks": 2}, "one_f_one_b has 1 stage on each rank, chunks=2"),
        ({"micro_batch": 13}, "more than a copy's 12"),
        ({"data": 4, "micro_batch": 4}, "more than a copy's 3"),
        ({"num_micro_batches": 13}, "cannot be cut into 13 micro-batches"),
        ({"data": 4, "num_micro_batches": 4}, "3 samples of a copy cannot be cut into 4"),
        ({"data": 1, "micro_batch": 2, "num_micro_batches": 5}, "is left by what is fixed: data=1, micro_batch=2"),
        ({"cuts": ["cut.99"]}, "no place to cut called 'cut.99'"),
        ({"cuts": ["cut.3", "cut.2"]}, "not in the order of the program"),
        ({"cuts": ["cut.2", "cut.2"]}, "not in the order of the program"),
        ({"cuts": 3}, "not a list of names"),
        ({"cuts": ["cut.2"], "pipeline": 3}, "1 cut makes 2 stages, pipeline=3 asks for 3"),
        ({"recompute": "full"}, "recompute='full' is not built yet"),
        ({"shard": "weights"}, "copies cannot share out 'weights'"),
        ({"shard": "parameters", "pipeline": 2}, 'shard="parameters" is for copies of the whole model, and 2 stages'),
        ({"shard": "parameters", "cuts": ("cut.1",)}, "copies of the whole model, and 2 stages"),
        ({"shard": "gradients", "chunks": 2, "pipeline": 2}, 'shard="gradients" is for one stage on each rank'),
        ({"shard": "optimizer", "codec": "int4"}, "codec int4 keeps what it loses"),
        ({"shard_ranks": 2}, "shard_ranks=2, but copies share nothing out"),
        ({"shard": "optimizer", "shard_ranks": 3, "data": 4}, "4 copies cannot share out in groups of 3"),
        ({"shard": "optimizer", "shard_ranks": 1}, "copies cannot share out in groups of 1"),
        ({"tensor": 2}, "tensor=2 is not built yet"),
        ({"codec": "int3"}, "there is no codec called 'int3'"),
        ({"precision": "bfloat16"}, "precision='bfloat16' is not built yet"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused(fixed: dict[str, object], fact: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(**fixed)
    assert fact in caught.value.fact
    assert caught.value.place and "fixed" in caught.value.place and caught.value.remedy


def test_more_stages_than_places_to_cut() -> None:
    with pytest.raises(PlanError, match="cut into at most 7 stages"):
        plan(size=8, pipeline=8)


def test_more_copies_than_samples() -> None:
    with pytest.raises(PlanError, match="4 copies cannot share 3 samples"):
        plan(batch=3, data=4)


def test_one_process_cannot_be_two() -> None:
    with pytest.raises(PlanError, match="data=2 needs 2 processes, there is 1 process"):
        plan(size=1, data=2)


def test_every_decision_has_a_field() -> None:
    assert set(KEYS) <= set(Plan.__dataclass_fields__)
