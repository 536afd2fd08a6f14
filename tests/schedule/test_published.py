"""The simulator against published bubbles and throughputs of pipelines on 8 to 32 A100."""

from __future__ import annotations

from itertools import permutations

import pytest

from headway.schedule.build import one_f_one_b
from headway.schedule.chunks import interleaved
from headway.schedule.costs import Costs
from headway.schedule.simulate import Timeline, simulate
from headway.schedule.zero_bubble import zero_bubble
from tests.schedule.published import MEASURED, Setting, settings


@pytest.fixture(scope="module", params=settings(), ids=lambda s: f"{s.model}-{s.num_micro}")
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture(scope="module")
def free(setting: Setting) -> dict[str, float]:
    """Give the cost of each schedule with messages beside the work, as the paper counts bubbles."""
    seconds = {name: longest(priced(setting, name)) for name in ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2")}
    return seconds | {"ZB-1p": seconds["ZB-H1"], "ZB-2p": seconds["ZB-H2"]}


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


def test_bubbles_are_those_that_were_printed(setting: Setting, free: dict[str, float]) -> None:
    work = setting.num_micro * (setting.forward + setting.input + setting.weight)
    for name in ("1F1B", "ZB-H1", "ZB-1p", "ZB-H2", "1F1B-I"):
        found = 1 - work / free[name]
        # Of interleaved ours is about one message a rank longer than theirs.
        assert found == pytest.approx(setting.bubble[name], abs=0.004 if name == "1F1B-I" else 6e-5)


def apart(setting: Setting) -> list[tuple[str, str]]:
    """List the pairs of schedules that were measured differently, the faster first."""
    return [(one, other) for one, other in permutations(MEASURED, 2) if setting.samples[one] > setting.samples[other]]


def test_schedules_are_ordered_as_they_were_measured(setting: Setting) -> None:
    """All pairs, when every rank of every schedule waits for what it sends."""
    seconds = {name: longest(priced(setting, name, overlap=False)) for name in MEASURED}
    assert [pair for pair in apart(setting) if seconds[pair[0]] >= seconds[pair[1]]] == []


def test_where_free_messages_order_otherwise_the_printed_bubbles_do_too(
    setting: Setting, free: dict[str, float]
) -> None:
    """What the simulator gets wrong with messages beside the work the paper's own theory gets wrong."""
    for faster, slower in apart(setting):
        if free[faster] >= free[slower]:
            assert (faster, slower) == ("ZB-1p", "1F1B-I")
            assert setting.bubble[faster] > setting.bubble[slower]


def test_so_many_pairs_are_told_apart() -> None:
    assert sum(len(apart(setting)) for setting in settings()) == 71
