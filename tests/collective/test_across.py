"""Who shares with whom, for ranks laid out as copies of stages, in groups."""

from __future__ import annotations

import pytest

from headway.collective.across import sharers
from headway.collective.world import World
from headway.errors import PlanError
from tests.several.ranks import on_ranks


def found(world: World) -> list[tuple[tuple[int, ...], ...]]:
    """Two stages of two copies: groups of one stage each, then both copies in one."""
    told = []
    for ranks in (1, 2, None):
        among = sharers(world, copies=2, pipeline=2, ranks=ranks)
        assert among.several == (ranks == 1)
        told.append((among.near.ranks, among.across, among.copies.ranks, among.model.ranks))
    return told


def test_groups_of_copies() -> None:
    for rank, (alone, both, every) in enumerate(on_ranks(4, found)):
        stage, copy = divmod(rank, 2)
        line = (2 * stage, 2 * stage + 1)
        assert alone == ((rank,), line, line, (copy, 2 + copy))
        assert both == every == (line, (rank,), line, (0, 1, 2, 3))


def test_groups_that_do_not_divide_the_copies_are_refused() -> None:
    with pytest.raises(PlanError, match="3 copies cannot share out in groups of 2"):
        sharers(World(), copies=3, pipeline=1, ranks=2)
