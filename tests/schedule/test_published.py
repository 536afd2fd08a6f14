"""The simulator against published bubbles and throughputs of pipelines on 8 to 32 A100."""

from __future__ import annotations

from itertools import combinations

import pytest

from headway.schedule.build import one_f_one_b
from headway.schedule.chunks import interleaved
from headway.schedule.costs import Costs
from headway.schedule.simulate import Timeline, simulate
from headway.schedule.zero_bubble import zero_bubble
from tests.schedule.published import MEASURED, Setting, settings

EVERY = pytest.mark.parametrize("setting", settings(), ids=lambda s: f"{s.model}-{s.num_micro}")


def priced(setting: Setting, name: str, *, overlap: bool = True) -> Timeline:
    """Simulate one of the paper's schedules with the times that it gives; interleaved has a stage for each layer.

    ZB-1p and ZB-2p are what an automatic search made of the memory of 1F1B and of twice that: for our search, and by
    the paper's own table for theirs, ZB-H1 is the best in the first; in the second ZB-H2 stands for it.
    """
    chunks = setting.layers if name == "1F1B-I" else 1
    stages = setting.num_ranks * chunks
    forward, first, second = (seconds / chunks for seconds in (setting.forward, setting.input, setting.weight))
    costs = Costs(
        (forward,) * stages,
        (first + second,) * stages,
        input=(first,) * stages,
        weight=(second,) * stages,
        message={(stage, stage + 1): setting.message for stage in range(stages - 1)},
        overlap=overlap,
    )
    if name == "1F1B-I":
        return simulate(interleaved(stages, setting.num_micro, chunks=chunks), costs)
    if name == "1F1B":
        return simulate(one_f_one_b(stages, setting.num_micro), costs)
    return simulate(zero_bubble(stages, setting.num_micro, ahead=2 if name in ("ZB-2p", "ZB-H2") else 1), costs)


def longest(timeline: Timeline) -> float:
    """Give the paper's cost: the longest time from a rank's first action to its last."""
    rows = [timeline.of(rank) for rank in range(timeline.num_ranks)]
    return max(row[-1].end - row[0].start for row in rows)


@EVERY
def test_bubbles_are_those_that_were_printed(setting: Setting) -> None:
    work = setting.num_micro * (setting.forward + setting.input + setting.weight)
    for name in ("1F1B", "ZB-H1", "ZB-1p", "ZB-H2", "1F1B-I"):
        found = 1 - work / longest(priced(setting, name))
        # Of interleaved ours is about one message a rank longer than theirs.
        assert found == pytest.approx(setting.bubble[name], abs=0.004 if name == "1F1B-I" else 6e-5)


@EVERY
def test_schedules_are_ordered_as_they_were_measured(setting: Setting) -> None:
    """All pairs but one kind: interleaved sends many more messages, and what was measured waits for each of them.

    With sends that its ranks wait for all pairs are right.
    """
    apart = {name: longest(priced(setting, name)) for name in MEASURED}
    waiting = apart | {"1F1B-I": longest(priced(setting, "1F1B-I", overlap=False))}
    for one, other in combinations(MEASURED, 2):
        if setting.samples[one] != setting.samples[other]:
            faster = setting.samples[one] > setting.samples[other]
            assert (waiting[one] < waiting[other]) == faster
            assert (apart[one] < apart[other]) == faster or {one, other} == {"1F1B-I", "ZB-1p"}
