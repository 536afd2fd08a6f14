"""Candidates: every copies x stages, schedule and number of micro-batches, as far as the user left them open."""

from __future__ import annotations

from collections.abc import Iterator

from headway.planner.choice import Choice
from headway.planner.fixed import Fixed
from headway.planner.plan import micro_batches
from headway.planner.refine import SEARCHED
from headway.schedule.catalogue import CATALOGUE

CHUNKS = (1, 2, 4)
"""Stages a rank that are tried where a schedule allows several."""

ALL_COUNTS = 8
"""Up to this many samples a copy, every number of micro-batches is tried."""


def layouts(size: int, fixed: Fixed, global_batch: int, max_stages: int) -> list[tuple[int, int]]:
    """Return the (copies, stages) to try: those that use the most ranks, all `size` of them where that is possible.

    There are at most as many copies as samples and as many stages as the model's cuts allow.
    """
    every = [
        (data, pipeline)
        for data in range(1, min(size, global_batch) + 1)
        for pipeline in range(1, min(size // data, max_stages) + 1)
        if fixed.data in (None, data) and fixed.pipeline in (None, pipeline) and data > ((fixed.sync_every or 1) > 1)
        if data % (fixed.shard_ranks or 1) == 0
    ]
    most = max((data * pipeline for data, pipeline in every), default=0)
    return [(data, pipeline) for data, pipeline in every if data * pipeline == most]


def counts(least: int, pipeline: int) -> list[int]:
    """Return the numbers of micro-batches to try for a copy of at least `least` samples.

    All of them up to 8 samples; above, powers of two, multiples of the stages up to eightfold, and one sample each.
    """
    if least <= ALL_COUNTS:
        return list(range(1, least + 1))
    powers = {1 << bit for bit in range(least.bit_length())}
    multiples = {times * pipeline for times in (1, 2, 3, 4, 6, 8)}
    return sorted(count for count in powers | multiples | {least} if count <= least)


def choices(fixed: Fixed, size: int, global_batch: int, max_stages: int) -> Iterator[Choice]:
    """Yield every candidate: copies x ranks, schedules with their chunks, micro-batches."""
    places = layouts(size, fixed, global_batch, max_stages)
    for data, pipeline in places:
        most, least = -(-global_batch // data), global_batch // data
        for schedule, chunks in orders(fixed, pipeline, max_stages, alone=all(p == 1 for _, p in places)):
            for count in _counts(fixed, most, least, pipeline):
                samples = fixed.micro_batch or -(-most // count)
                yield Choice(data, pipeline, schedule, samples, count, chunks, fixed.order, fixed.shard or "none")


def orders(fixed: Fixed, pipeline: int, max_stages: int, *, alone: bool) -> list[tuple[str, int]]:
    """Return the (schedule, chunks) to try on so many ranks.

    With one stage all schedules are the same work, and 1F1B keeps the fewest activations. `backward_first` is left out
    unless asked for: as planned it is 1F1B, action for action. `alone`: there is no layout of several ranks, so a
    schedule that was asked for is carried out on one.
    """
    if fixed.order:
        return [(str(fixed.schedule), fixed.chunks or 1)]
    free = fixed.schedule in (None, SEARCHED)
    names = [name for name in CATALOGUE if name != "backward_first"] if free else [str(fixed.schedule)]
    if pipeline == 1 and free and (fixed.chunks or 1) == 1:
        names = ["one_f_one_b"]
    if pipeline == 1 and fixed.schedule and not free and not alone and CATALOGUE[fixed.schedule].least > 1:
        return []
    return [
        (name, chunks)
        for name in names
        for chunks in ([fixed.chunks] if fixed.chunks else sorted({CATALOGUE[name].least, *CHUNKS}))
        if CATALOGUE[name].allows(chunks) and pipeline * chunks <= max_stages
    ]


def _counts(fixed: Fixed, most: int, least: int, pipeline: int) -> list[int]:
    if fixed.num_micro_batches is not None:
        tried = [fixed.num_micro_batches] if fixed.num_micro_batches <= least else []
    elif fixed.micro_batch is not None:
        tried = [count for count in (-(-most // fixed.micro_batch),) if count <= least]
    else:
        return counts(least, pipeline)
    return [count for count in tried if fixed.micro_batch is None or count * fixed.micro_batch >= most]


def sizes(choice: Choice, global_batch: int) -> set[int]:
    """Return the sizes of all micro-batches of all copies, in samples."""
    shares = {global_batch // choice.data, -(-global_batch // choice.data)}
    return {
        size for share in shares for size in set(micro_batches(share, choice.num_micro_batches, choice.micro_batch))
    }
