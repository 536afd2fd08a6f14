"""Text timelines: every cell tells what a rank did in that part of the step; a journal's spans draw the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.journal import SpanSeen
from headway.report.timeline import beside, draw, for_every_copy, order_of, peaks, timeline_of
from headway.schedule.action import Action, Kind
from headway.schedule.build import gpipe, one_f_one_b
from headway.schedule.simulate import Costs, simulate
from headway.schedule.timeline import Span, Timeline

TWO = Timeline(
    2,
    (
        Span(0, Action(Kind.F, 0, 0), 0.0, 1.0),
        Span(0, Action(Kind.B, 0, 0), 3.0, 4.0),
        Span(1, Action(Kind.F, 1, 0), 1.0, 2.0),
        Span(1, Action(Kind.B, 1, 0), 2.0, 3.0),
        Span(0, Action(Kind.SEND, 0, 0, 1), 1.0, 1.1),
    ),
)


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank")]


def test_each_quarter_of_the_row_is_a_quarter_of_the_step() -> None:
    labels, busy = len("rank 0") + 2, len("busy 50%") + 2
    drawn = rows(draw(TWO, width=40 + labels + busy))
    assert [row[labels : labels + 40] for row in drawn] == [
        "F0--------" + "." * 20 + "B0========",
        "." * 10 + "F0--------" + "B0========" + "." * 10,
    ]
    assert all(row.endswith("busy 50%") for row in drawn)


def test_planned_and_happened_share_one_scale() -> None:
    slower = Timeline(2, tuple(Span(s.rank, s.action, 2 * s.start, 2 * s.end) for s in TWO.spans))
    text = beside(TWO, slower, width=80).splitlines()
    planned, happened = text[1], text[2]
    assert planned.startswith("rank 0  planned") and happened.strip().startswith("happened")
    assert happened.index("B0") - happened.index("F0") == pytest.approx(
        2 * (planned.index("B0") - planned.index("F0")), abs=1
    )
    assert "planned 4 s, bubble 50%; happened 8 s, bubble 50%" == text[-1]


def test_order_without_time() -> None:
    assert order_of(TWO).splitlines() == ["rank 0  F0 B0", "rank 1  F0 B0"]


def test_the_journals_spans_draw_the_same() -> None:
    assert timeline_of(SpanSeen.of(TWO.spans)) == TWO


def test_a_copys_timeline_stands_for_every_copy() -> None:
    copied = for_every_copy(TWO, 4)
    assert copied.num_ranks == 4 and copied.bubble == TWO.bubble
    for rank in range(4):  # copies are neighbours
        same = [(span.action, span.start, span.end) for span in TWO.of(rank // 2)]
        assert [(span.action, span.start, span.end) for span in copied.of(rank)] == same
    assert for_every_copy(TWO, 3) is TWO


def test_an_empty_timeline_can_be_drawn() -> None:
    assert "rank 0" in draw(Timeline(1, ())) and beside(Timeline(1, ()), TWO)


def test_peaks() -> None:
    known = Timeline(2, (), (((0.0, 2**20), (1.0, 3 * 2**20)), ((0.0, 1024),)))
    assert peaks(known, TWO).splitlines() == ["rank 0  planned 3 MiB", "rank 1  planned 1 KiB"]


@settings(max_examples=60, deadline=None)
@given(
    builder=st.sampled_from([gpipe, one_f_one_b]),
    num_stages=st.integers(1, 4),
    num_micro=st.integers(1, 12),
    width=st.integers(40, 160),
    backward=st.floats(0.1, 5),
)
def test_any_schedule_fits_its_width_and_shows_idle_where_the_simulator_does(
    builder, num_stages: int, num_micro: int, width: int, backward: float
) -> None:
    costs = Costs(forward=(1.0,) * num_stages, backward=(backward,) * num_stages)
    timeline = simulate(builder(num_stages, num_micro), costs)
    drawn = rows(draw(timeline, width=width))
    assert len(drawn) == num_stages and all(len(row) <= width for row in drawn)
    for rank, row in enumerate(drawn):
        cells = row.split()[2]
        idle = cells.count(".") / len(cells)
        # Each of a rank's spans is rounded to whole columns at both ends.
        assert idle == pytest.approx(1 - timeline.busy(rank) / timeline.makespan, abs=2 * num_micro / len(cells) + 0.02)
