"""Rules: how a rank that is free chooses what to do, and the rules to begin a search with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from headway.schedule.action import Kind
from headway.schedule.bound import heads_and_tails
from headway.schedule.work import Work

Table = Sequence[Sequence[float]]
"""[jobs][micro-batches] the smaller goes first"""

NAMES = "backward", "deep", "forward", "head", "tail"


@dataclass(frozen=True)
class Rules:
    """How free ranks choose among the jobs that could start.

    `prefer[rank]` names the table that orders forwards and input gradients (or whole backwards); weight gradients fill
    what is left. `most[stage]` bounds the micro-batches that a stage keeps. `patience[rank]`: rather than start a
    weight gradient, a rank waits for what is on its way for up to this share of the weight gradient's seconds.
    `hungry[rank]`: weight gradients go first while a forward waits for the memory that they hold.
    """

    prefer: tuple[str, ...]
    most: tuple[int, ...]
    patience: tuple[float, ...]
    hungry: tuple[bool, ...]


def tables(work: Work) -> Mapping[str, Table]:
    """Give the tables to prefer by.

    "backward": backwards first, older micro-batches first; "deep": backwards first, then what is further on its way;
    "forward": forwards first; "head": what could start earliest, were there no queues; "tail": what has the longest way
    to go.
    """
    heads, tails = heads_and_tails(work)
    micros, num_stages = range(work.num_micro), len(work.placement)
    back = [kind is not Kind.F for kind in work.kinds]
    further = [stage if b else num_stages - 1 - stage for stage, b in zip(work.stages, back, strict=True)]
    most = work.num_micro * num_stages
    jobs = range(work.num_jobs)
    return {
        "backward": [[m * num_stages + further[job] + most * (not back[job]) for m in micros] for job in jobs],
        "deep": [[m + work.num_micro * further[job] + most * (not back[job]) for m in micros] for job in jobs],
        "forward": [[m * num_stages + further[job] + most * back[job] for m in micros] for job in jobs],
        "head": heads,
        "tail": [[-tail for tail in row] for row in tails],
    }


def first_rules(work: Work) -> Iterator[Rules]:
    """Yield the rules to begin with, the same on all ranks: the tables, and how much stages keep.

    A stage keeps as many micro-batches as come by while one goes from its forward to its last action and back, at the
    pace of the busiest rank; or some more; or as many as memory takes.
    """
    heads, _ = heads_and_tails(work)
    pace = max(sum(work.seconds[job] for job in jobs) for jobs in work.of_rank)
    last = {work.stages[job]: job for job in range(work.num_jobs) if work.ends[job]}
    natural = [
        (heads[last[stage]][0] + work.seconds[last[stage]] - heads[work.job[Kind.F, stage]][0]) / (pace or 1.0)
        for stage in range(len(work.placement))
    ]
    kept = {tuple(max(1, math.ceil(n + more - 1e-9)) for n in natural): None for more in (work.num_micro, 3, 2, 1, 0)}
    kept |= {(1,) * len(natural): None}
    ranks = work.num_ranks
    for name, most in product(NAMES, kept):
        yield Rules((name,) * ranks, most, (0.0,) * ranks, (False,) * ranks)


def second_rules(rules: Rules) -> Iterator[Rules]:
    """Yield rules that treat weight gradients otherwise, on all ranks."""
    ranks = len(rules.prefer)
    for hungry, patience in product((False, True), (0.0, 0.5, 1.0)):
        yield replace(rules, hungry=(hungry,) * ranks, patience=(patience,) * ranks)
