"""Plan as a value: shares and micro-batches, saving and loading, fingerprints, words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.cluster import Cluster
from headway.errors import PlanError
from headway.planner.plan import Plan, micro_batches, shares
from headway.planner.search import search
from tests.cost.graphs import chain, times

CLUSTER = Cluster("4xcpu:256MiB")


def make(**fixed: object) -> Plan:
    return search(lambda n: chain(n, (64,) * 9), times, CLUSTER, global_batch=12, optimizer_states=2, fixed=fixed)


@given(st.integers(1, 200), st.integers(1, 200))
def test_micro_batches_follow_the_rule(samples: int, count: int) -> None:
    if count > samples:
        with pytest.raises(PlanError):
            micro_batches(samples, count)
        return
    sizes, most = micro_batches(samples, count), -(-samples // count)
    assert sum(sizes) == samples and len(sizes) == count and min(sizes) >= 1 and max(sizes) == most
    if -(-samples // most) == count:
        assert all(size == most for size in sizes[:-1])
    else:
        assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


def test_micro_batches_by_hand() -> None:
    assert micro_batches(12, 5) == (3, 3, 2, 2, 2)  # four of 3 would do: so five nearly equal ones
    assert micro_batches(11, 4) == (3, 3, 3, 2)
    assert micro_batches(7, 3) == (3, 3, 1)
    assert micro_batches(12, 3, 5) == (5, 5, 2)
    with pytest.raises(PlanError, match="of at most 3"):
        micro_batches(12, 3, 3)


@given(st.integers(1, 100), st.integers(1, 20))
def test_shares_differ_by_one_at_most(total: int, parts: int) -> None:
    result = shares(total, parts)
    assert sum(result) == total and max(result) - min(result) <= 1 and list(result) == sorted(result, reverse=True)


@pytest.mark.parametrize("fixed", [{}, {"pipeline": 4}, {"pipeline": 2, "schedule": "gpipe", "num_micro_batches": 3}])
def test_a_saved_plan_is_the_same_plan(fixed: dict[str, object], tmp_path: Path) -> None:
    plan = make(**fixed)
    plan.save(tmp_path / "plan.toml")
    loaded = Plan.load(tmp_path / "plan.toml")
    assert loaded == plan
    assert loaded.timeline == plan.timeline and loaded.fingerprint == plan.fingerprint
    assert str(loaded) == str(plan) and loaded.explain() == plan.explain()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data = ", "not TOML"),
        ("data = 2", "damaged"),
        ("colour = 3", "unknown fields colour"),
        ("format = 9", "format 9"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=part) as caught:
        Plan.load(path)
    assert caught.value.place == str(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        Plan.load(tmp_path / "plan.toml")


def test_fingerprint_says_what_differs() -> None:
    plan = make(pipeline=2)
    plan.check_fingerprint(chain(3, (64,) * 9), CLUSTER)  # the samples of a micro-batch are no difference
    plan.check_fingerprint(chain(3, (64,) * 9), Cluster("4xcpu:1GiB"))  # nor is free memory
    with pytest.raises(PlanError, match="another model: it was made for 32,768 parameters in 8 tensors.* 28,672 in 7"):
        plan.check_fingerprint(chain(3, (64,) * 8), CLUSTER)
    with pytest.raises(PlanError, match="another machine: it was made for 1x4xcpu, this is 1x2xcpu"):
        plan.check_fingerprint(chain(3, (64,) * 9), Cluster("2xcpu:256MiB"))
    graph = chain(3, (64,) * 9)
    other = replace(graph, values=(replace(graph.values[0], dtype="float64"), *graph.values[1:]))
    with pytest.raises(PlanError, match=r"another batch: it was made for float32 \[\*, 64\], .* float64 \[\*, 64\]"):
        plan.check_fingerprint(other, CLUSTER)
    moved = replace(graph, calls=(replace(graph.calls[0], function="torch.mm"), *graph.calls[1:]))
    with pytest.raises(PlanError, match="another program"):
        plan.check_fingerprint(moved, CLUSTER)
    renamed = replace(graph, parameters=(replace(graph.parameters[0], name="other"), *graph.parameters[1:]))
    with pytest.raises(PlanError, match="names, shapes, dtypes or trainability differ"):
        plan.check_fingerprint(renamed, CLUSTER)


@pytest.mark.parametrize("fixed", [{}, {"pipeline": 2}, {"data": 1}])
def test_words_are_few_and_carry_the_numbers(fixed: dict[str, object]) -> None:
    plan = make(**fixed)
    lines = str(plan).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 160
    assert lines[0].startswith("plan ") and any(line.startswith("expect ") for line in lines)
    assert any(line.startswith("why ") for line in lines) and lines[-1].startswith("binds ")
    assert "256 MiB" in str(plan)
    long = plan.explain()
    assert all(reason in long for reason in plan.reasons) and all(cut in long for cut in plan.cuts)
    assert (str(plan.lowered) in long) == (plan.pipeline > 1), "a grid with a line for each rank of a copy"


def test_many_copies_of_a_short_pipeline_show_its_grid() -> None:
    cluster = Cluster("12xcpu:256MiB")
    fixed = {"pipeline": 2, "num_micro_batches": 1}
    plan = search(lambda n: chain(n, (64,) * 9), times, cluster, global_batch=12, optimizer_states=2, fixed=fixed)
    assert plan.size == 12 and plan.explain().endswith(str(plan.lowered))


def test_ranks_count_copies_innermost() -> None:
    plan = make(data=2, pipeline=2)
    assert plan.size == 4 and len(plan.memory) == 4
    assert plan.memory[0] == plan.memory[1] and plan.memory[2] == plan.memory[3]
    assert shares(plan.global_batch, plan.data) == (6, 6)
    sizes = micro_batches(6, plan.num_micro_batches, plan.micro_batch)
    assert sum(sizes) == 6 and max(sizes) == plan.micro_batch
