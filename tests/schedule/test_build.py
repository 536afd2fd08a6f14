"""Every schedule against its closed forms: bubble, micro-batches in flight, order."""

from __future__ import annotations

import pytest

from headway.schedule.action import Kind, Schedule
from headway.schedule.build import forward_only, gpipe, one_f_one_b
from headway.schedule.check import check
from headway.schedule.simulate import Costs, simulate

SIZES = [(p, m) for p in range(1, 7) for m in (*range(1, 9), 13)]


def kinds(schedule: Schedule, stage: int, kind: Kind) -> list[int]:
    return [a.micro for actions in schedule.ranks for a in actions if a.stage == stage and a.kind is kind]


BUILDERS = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("num_stages", "num_micro"), SIZES)
def test_is_complete_in_order_and_can_finish(name: str, num_stages: int, num_micro: int) -> None:
    schedule = BUILDERS[name](num_stages, num_micro)
    check(schedule)
    assert (schedule.name, schedule.num_stages, schedule.num_micro) == (name, num_stages, num_micro)
    for stage in range(num_stages):
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            order = kinds(schedule, stage, kind)
            assert order == sorted(order), "gradients must add up in the same order under every schedule"


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("num_stages", "num_micro"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0)])
def test_bubble(name: str, num_stages: int, num_micro: int, forward: float, backward: float) -> None:
    costs = Costs(forward=(forward,) * num_stages, backward=(backward,) * num_stages)
    timeline = simulate(BUILDERS[name](num_stages, num_micro), costs)
    assert timeline.makespan == pytest.approx((num_micro + num_stages - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((num_stages - 1) / (num_micro + num_stages - 1))


@pytest.mark.parametrize(("num_stages", "num_micro"), SIZES)
def test_micro_batches_in_flight(num_stages: int, num_micro: int) -> None:
    """Counted in the schedule and, in time, by memory of one byte for each activation."""
    costs = Costs((1.0,) * num_stages, (2.0,) * num_stages, activation_bytes=(1,) * num_stages)
    for schedule, expected in (
        (gpipe(num_stages, num_micro), [num_micro] * num_stages),
        (one_f_one_b(num_stages, num_micro), [min(num_stages - s, num_micro) for s in range(num_stages)]),
    ):
        assert list(schedule.in_flight) == expected
        timeline = simulate(schedule, costs)
        assert [timeline.peak_bytes(rank) for rank in range(num_stages)] == expected


@pytest.mark.parametrize(("num_stages", "num_micro"), SIZES)
def test_evaluation_has_no_backward(num_stages: int, num_micro: int) -> None:
    schedule = forward_only(num_stages, num_micro)
    check(schedule)
    assert not schedule.trains
    timeline = simulate(schedule, Costs(forward=(1.0,) * num_stages, activation_bytes=(1,) * num_stages))
    assert timeline.makespan == num_micro + num_stages - 1
    assert timeline.bubble == pytest.approx((num_stages - 1) / (num_micro + num_stages - 1))
    assert [timeline.peak_bytes(rank) for rank in range(num_stages)] == [1] * num_stages


@pytest.mark.parametrize("builder", [*BUILDERS.values(), forward_only])
@pytest.mark.parametrize(("num_stages", "num_micro"), [(0, 1), (1, 0), (-1, 4)])
def test_nothing_to_schedule_is_refused(builder, num_stages: int, num_micro: int) -> None:
    with pytest.raises(ValueError, match="needs at least 1 stage and 1 micro-batch"):
        builder(num_stages, num_micro)


@pytest.mark.parametrize(("chunks", "num_ranks"), [(1, 3), (2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("num_micro", [1, 2, 5])
def test_evaluation_of_several_stages_a_rank(chunks: int, num_ranks: int, num_micro: int) -> None:
    num_stages = chunks * num_ranks
    vee = tuple(min(s, num_stages - 1 - s) for s in range(num_stages))
    for placement in (tuple(s % num_ranks for s in range(num_stages)), *([vee] if chunks == 2 else [])):
        schedule = forward_only(num_stages, num_micro, placement)
        check(schedule)
        busy = max(placement.count(rank) for rank in range(num_ranks)) * num_micro
        makespan = simulate(schedule, Costs(forward=(1.0,) * num_stages)).makespan
        assert busy <= makespan <= busy + num_stages
