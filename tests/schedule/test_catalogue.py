"""The catalogue: every name builds its schedule, and what it has no place for is refused."""

from __future__ import annotations

import pytest

from headway.errors import PlanError
from headway.schedule.catalogue import CATALOGUE, build
from headway.schedule.check import check


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize(("num_ranks", "num_micro"), [(1, 1), (2, 5), (4, 3), (3, 8)])
def test_entries_tell_the_truth(name: str, num_ranks: int, num_micro: int) -> None:
    entry = CATALOGUE[name]
    for chunks in {entry.least, entry.most or entry.least + 1}:
        schedule = build(name, num_ranks, num_micro, chunks)
        check(schedule)
        assert schedule.name == name
        assert (schedule.num_ranks, schedule.num_stages) == (num_ranks, num_ranks * chunks)
        assert all(len(schedule.stages(rank)) == chunks for rank in range(num_ranks))
        assert bool(schedule.split) == entry.split or (entry.split and num_micro == 1)


def test_refusals() -> None:
    with pytest.raises(PlanError, match="(?s)no schedule called 'fast'.*one_f_one_b"):
        build("fast", 2, 2)
    with pytest.raises(PlanError, match="(?s)gpipe has 1 stage on each rank, not 2.*interleaved"):
        build("gpipe", 2, 2, 2)
    with pytest.raises(PlanError, match="zero_bubble_v has 2 stages on each rank, not 3"):
        build("zero_bubble_v", 2, 2, 3)
    with pytest.raises(PlanError, match="interleaved has 2 stages or more on each rank, not 1"):
        build("interleaved", 2, 2)
    with pytest.raises(TypeError):
        CATALOGUE["mine"] = CATALOGUE["gpipe"]  # type: ignore[index]
