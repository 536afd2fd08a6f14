"""Schedules with several stages a rank, against their closed forms."""

from __future__ import annotations

import pytest

from headway.schedule.action import Kind, chain
from headway.schedule.build import gpipe, one_f_one_b
from headway.schedule.check import check
from headway.schedule.chunks import breadth_first, interleaved
from headway.schedule.lower import lower
from headway.schedule.simulate import Costs, simulate

SIZES = [(p, v, m) for p in (1, 2, 3, 4, 6) for v in (1, 2, 3) for m in (1, 2, 3, 4, 5, 6, 8, 12, 13)]


def makespan(schedule) -> float:
    return simulate(schedule, Costs((1.0,) * schedule.num_stages, (2.0,) * schedule.num_stages)).makespan


@pytest.mark.parametrize("builder", [interleaved, breadth_first])
@pytest.mark.parametrize(("num_ranks", "chunks", "num_micro"), SIZES)
def test_time(builder, num_ranks: int, chunks: int, num_micro: int) -> None:
    """(m v + p - 1) forwards and backwards long where groups are whole; a ragged one costs at most a whole one."""
    schedule = builder(num_ranks * chunks, num_micro, chunks=chunks)
    check(schedule)
    check(lower(schedule, chain(schedule.num_stages)))
    assert schedule.placement == tuple(range(num_ranks)) * chunks
    whole = -(-num_micro // num_ranks) * num_ranks
    if num_micro == whole or (builder is breadth_first and num_micro >= num_ranks):
        assert makespan(schedule) == 3.0 * (num_micro * chunks + num_ranks - 1)
    else:
        assert makespan(schedule) <= 3.0 * (whole * chunks + num_ranks - 1)
    for stage in range(schedule.num_stages):
        for kind in (Kind.F, Kind.B):
            order = [a.micro for row in schedule.ranks for a in row if (a.kind, a.stage) == (kind, stage)]
            assert order == list(range(num_micro))


def test_one_chunk_is_the_plain_schedule() -> None:
    assert interleaved(4, 6, chunks=1).ranks == one_f_one_b(4, 6).ranks
    assert breadth_first(4, 6, chunks=1).ranks == gpipe(4, 6).ranks


@pytest.mark.parametrize(("num_ranks", "chunks", "num_micro"), [size for size in SIZES if size[1] > 1])
def test_activations(num_ranks: int, chunks: int, num_micro: int) -> None:
    """Rank r keeps at most (v - 1) p + 2 (p - 1 - r) + 1 under interleaving, all m v breadth first."""
    stages = num_ranks * chunks
    costs = Costs((1.0,) * stages, (2.0,) * stages, activation_bytes=(1,) * stages)
    timeline = simulate(interleaved(stages, num_micro, chunks=chunks), costs)
    for rank in range(num_ranks):
        most = (chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1
        assert timeline.peak_bytes(rank) <= min(most, num_micro * chunks)
        if num_micro % num_ranks == 0:
            assert timeline.peak_bytes(rank) == min(most, num_micro * chunks)
    assert breadth_first(stages, num_micro, chunks=chunks).in_flight == (num_micro,) * stages


@pytest.mark.parametrize("builder", [interleaved, breadth_first])
def test_what_cannot_be_dealt_round_is_refused(builder) -> None:
    with pytest.raises(ValueError, match="needs 2 stages on each rank, which does not divide 5 stages"):
        builder(5, 4, chunks=2)
    for arguments in ((0, 1), (2, 0)):
        with pytest.raises(ValueError, match="needs at least 1 stage and 1 micro-batch"):
            builder(*arguments)
