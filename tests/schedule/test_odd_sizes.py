"""Every built schedule where there is little to do, or an odd number of it: checked here and by torch, and counted."""

from __future__ import annotations

import csv
from itertools import product

import pytest
from torch.distributed.pipelining import schedules as theirs

from headway.schedule.catalogue import CATALOGUE
from headway.schedule.check import check
from headway.schedule.costs import Costs
from headway.schedule.exchange import read_csv, write_csv
from headway.schedule.simulate import simulate


def span(name: str, ranks: int, micros: int, chunks: int) -> float | None:
    """Give the longest time from a rank's first action to its last, F of 1 s and B of 2 s; None where no form holds."""
    if name in ("gpipe", "one_f_one_b", "backward_first"):
        return 3.0 * (micros + ranks - 1)
    if (name == "breadth_first" and micros >= ranks) or (name == "interleaved" and micros % ranks == 0):
        return 3.0 * (micros * chunks + ranks - 1)
    if name == "zero_bubble" and micros >= 2 * ranks:
        return 3.0 * micros + ranks - 1
    if micros == 1 and name in ("breadth_first", "interleaved"):
        return 3.0 * ranks * chunks
    return 3.0 * chunks * micros if ranks == 1 else None


def kept(name: str, ranks: int, micros: int, chunks: int) -> int:
    """Give the most activations that a rank may keep at once."""
    together = micros * chunks
    return {
        "gpipe": micros,
        "one_f_one_b": min(ranks, micros),
        "backward_first": min(ranks, micros),
        "zero_bubble": min(ranks, micros),
        "zero_bubble_h2": min(2 * ranks - 1, micros),
        "interleaved": min((chunks - 1) * ranks + 2 * (ranks - 1) + 1, together),
        "breadth_first": together,
        "zero_bubble_v": min(2 * ranks, together),
        "dual_pipe_v": min(2 * ranks + 1, together),
    }[name]


@pytest.mark.parametrize("name", CATALOGUE)
def test_few_ranks_few_micro_batches_many_chunks(name: str) -> None:
    entry = CATALOGUE[name]
    sizes = product((1, 2, 3, 5), (1, 2, 3, 4, 7, 9), (chunks for chunks in range(1, 5) if entry.allows(chunks)))
    for ranks, micros, chunks in sizes:
        stages = ranks * chunks
        schedule = entry.build(stages, micros, chunks)
        check(schedule)
        timeline = simulate(schedule, Costs((1.0,) * stages, (2.0,) * stages, activation_bytes=(1,) * stages))
        rows = [timeline.of(rank) for rank in range(ranks)]
        expected = span(name, ranks, micros, chunks)
        assert expected in (None, max(row[-1].end - row[0].start for row in rows)), (ranks, micros, chunks)
        assert timeline.makespan <= 3.0 * stages * micros
        assert max(map(timeline.peak_bytes, range(ranks))) <= kept(name, ranks, micros, chunks), (ranks, micros, chunks)
        text = write_csv(schedule)
        assert read_csv(text, name=schedule.name) == schedule
        table = {
            rank: [theirs._Action.from_str(cell) for cell in row]
            for rank, row in enumerate(csv.reader(text.splitlines()))
        }
        placed = theirs._validate_schedule(table, ranks, stages, micros)
        assert tuple(placed[stage] for stage in range(stages)) == schedule.placement
