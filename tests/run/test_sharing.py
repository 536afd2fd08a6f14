"""Sharing: batches whose leaves lie in memory in any way."""

from __future__ import annotations

import pytest
import torch

from headway.collective.world import World
from headway.run.sharing import Sharing
from tests.several.ranks import on_ranks


def shared(world: World) -> list[int]:
    """Share batches of one sample, and of none for the second copy, out of a column of a table."""
    table = torch.arange(6).view(2, 3)
    sharing = Sharing(world, 2, world.rank, world.everyone)
    return [sharing.share((table[:rows, 1], table[:rows].T.contiguous().T))[0].numel() for rows in (1, 2)]


@pytest.mark.several
def test_a_column_of_one_row_is_compared_over_ranks() -> None:
    assert on_ranks(2, shared) == [[1, 1], [0, 1]]
