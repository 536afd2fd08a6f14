"""resized: every built schedule can finish for more and for fewer micro-batches, and keeps no more."""

from __future__ import annotations

import pytest

from headway.schedule.catalogue import CATALOGUE, build
from headway.schedule.check import check
from headway.schedule.lower import lower
from headway.schedule.resize import resized


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_other_numbers_of_micro_batches(name: str, num_ranks: int) -> None:
    schedule = build(name, num_ranks, 5, CATALOGUE[name].least)
    for num_micro in range(1, 13):
        found = resized(schedule, num_micro)
        check(found)
        assert (found.num_micro, found.placement, found.name) == (num_micro, schedule.placement, name)
        assert all(now <= before for now, before in zip(found.in_flight, schedule.in_flight, strict=True))
    assert resized(schedule, 5) == schedule


def test_refusals() -> None:
    schedule = build("gpipe", 2, 3)
    with pytest.raises(ValueError, match="0 micro-batches"):
        resized(schedule, 0)
    with pytest.raises(ValueError, match="with messages"):
        resized(lower(schedule, [(0, 1)]), 2)
