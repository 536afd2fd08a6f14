"""Timelines as SVG: each bar is one action, where and as long as it was; both timelines on one scale."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from headway import journal
from headway.cli import headway
from headway.report.picture import svg
from headway.schedule.action import COMPUTES, Kind, chain
from headway.schedule.catalogue import build
from headway.schedule.lower import lower
from headway.schedule.simulate import Costs, simulate
from headway.schedule.timeline import Timeline, recorded

SPACE = "{http://www.w3.org/2000/svg}"


def planned(name: str = "zero_bubble", chunks: int = 1) -> Timeline:
    schedule = lower(build(name, 3, 5, chunks), chain(3 * chunks))
    stages = schedule.num_stages
    costs = Costs((1.0,) * stages, (2.0,) * stages, message=dict.fromkeys(chain(stages), 0.25), reduce=(1.5,) * stages)
    return simulate(schedule, costs)


def slower(timeline: Timeline, factor: float) -> Timeline:
    return recorded((s.rank, s.action, s.start * factor, s.end * factor) for s in timeline.spans)


def bars(text: str, kind: str) -> list[dict[str, str]]:
    root = ElementTree.fromstring(text)
    return [
        e.attrib
        for e in root.iter(f"{SPACE}rect")
        if e.find(f"{SPACE}title") is not None and kind in e.attrib["class"].split()
    ]


@pytest.mark.parametrize(("name", "chunks"), [("one_f_one_b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_every_action_is_a_bar_in_its_place(name: str, chunks: int) -> None:
    timeline = planned(name, chunks)
    text = svg({"planned": timeline, "happened": slower(timeline, 1.25)}, width=1000)
    for kind in (*COMPUTES, Kind.REDUCE):
        found = bars(text, str(kind))
        spans = [span for span in timeline.spans if span.action.kind is kind]
        assert len(found) == 2 * len(spans)
        ys = sorted({float(bar["y"]) for bar in found})
        assert not found or len(ys) == 2 * timeline.num_ranks
        for rank, y in enumerate(ys[::2]):
            here = sorted(float(bar["x"]) for bar in found if float(bar["y"]) == y)
            there = sorted(float(bar["x"]) for bar in found if float(bar["y"]) == ys[2 * rank + 1])
            starts = sorted(span.start for span in timeline.of(rank) if span.action.kind is kind)
            left, scale = 132, (1000 - 132 - 76) / (timeline.makespan * 1.25)
            assert here == pytest.approx([left + start * scale for start in starts], abs=0.06)
            assert there == pytest.approx([left + start * scale * 1.25 for start in starts], abs=0.06)
    messages = [span for span in timeline.spans if span.action.kind in (Kind.SEND, Kind.SEND_GRAD)]
    assert len(bars(text, "sent")) == 2 * len(messages)


def test_bars_of_a_row_do_not_overlap_and_stay_on_the_page() -> None:
    text = svg({"planned": planned()}, width=900)
    rows: dict[str, list[tuple[float, float]]] = {}
    for kind in (*COMPUTES, Kind.REDUCE):
        for bar in bars(text, str(kind)):
            rows.setdefault(bar["y"], []).append((float(bar["x"]), float(bar["x"]) + float(bar["width"])))
    assert len(rows) == 3
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] + 0.11 for before, after in zip(row, row[1:], strict=False))
        assert row[0][0] >= 132 and row[-1][1] <= 900 - 76


def test_names_are_whole_or_left_out() -> None:
    wide, narrow = (svg({"planned": planned("interleaved", 2)}, width=width) for width in (2400, 400))
    named = [
        [e.text for e in ElementTree.fromstring(t).iter(f"{SPACE}text") if e.get("class") == "name"]
        for t in (wide, narrow)
    ]
    assert {"0F0", "5B4", "3F2"} <= set(named[0])
    assert all(name.isdigit() or name in ("R", "reduce") for name in named[1])


def test_what_it_says_of_itself() -> None:
    timeline = planned()
    root = ElementTree.fromstring(svg({"planned": timeline, "a <b> & c": slower(timeline, 2.0)}))
    words = [e.text for e in root.iter(f"{SPACE}text")]
    assert {"rank 0", "rank 2", "planned", "a <b> & c", "F forward", "W weight gradient", "message"} <= set(words)
    assert "B backward" not in words
    title = root.find(f"{SPACE}title")
    assert title is not None and title.text is not None and title.text.startswith("planned 20.5 s, bubble 20%; a <b>")
    assert "prefers-color-scheme:dark" in "".join(root.itertext())
    first = next(e for e in root.iter(f"{SPACE}title") if e.text and e.text.startswith("F0 of stage 0"))
    assert first.text == "F0 of stage 0, from 0 s for 1 s"


def test_an_empty_or_uneven_pair_can_be_drawn() -> None:
    text = svg({"planned": Timeline(1, ()), "happened": planned()})
    assert text.count(">rank ") == 3
    ElementTree.fromstring(svg({"planned": Timeline(1, ())}))
    for timelines, width in (({}, 900), ({"planned": planned()}, 300)):
        with pytest.raises(ValueError, match="a picture needs"):
            svg(timelines, width=width)


def test_show_writes_it(tmp_path: Path) -> None:
    spans = journal.SpanSeen.of(planned().spans)
    journal.Journal(tmp_path, 0).write(journal.TimelineSeen(2, spans, spans))
    shown = CliRunner().invoke(
        headway, ["show", str(tmp_path), "--svg", str(tmp_path / "out.svg")], standalone_mode=False
    )
    assert shown.exception is None and "picture:" in shown.output
    assert len(bars((tmp_path / "out.svg").read_text(), "F")) == 2 * 15
