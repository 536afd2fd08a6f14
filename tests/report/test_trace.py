"""A Chrome trace: JSON that a viewer reads, with every span once, and threads whose spans do not overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from headway.report.trace import chrome_trace, write_trace
from headway.schedule.build import one_f_one_b
from headway.schedule.lower import lower
from headway.schedule.simulate import Costs, simulate
from headway.schedule.timeline import Timeline


def timeline() -> Timeline:
    costs = Costs(forward=(1.0,) * 3, backward=(2.0,) * 3, message={(0, 1): 0.5, (1, 2): 0.5}, reduce=(0.1,) * 3)
    return simulate(lower(one_f_one_b(3, 5), [(0, 1), (1, 2)]), costs)


def test_every_span_is_there_in_microseconds() -> None:
    line = timeline()
    events = [event for event in chrome_trace({"planned": line})["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(line.spans)
    assert max(event["ts"] + event["dur"] for event in events) == line.makespan * 1e6


def test_spans_of_one_thread_do_not_overlap() -> None:
    threads = defaultdict(list)
    for event in chrome_trace({"planned": timeline(), "happened": timeline()})["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len({process for process, _ in threads}) == 2
    for process, thread in threads:
        if thread % 2 == 0:  # what a rank does; messages on the way may overtake each other on different links
            spans = sorted(threads[process, thread])
            assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_names_and_memory() -> None:
    line = Timeline(1, (), (((0.0, 5), (1.0, 7)),))
    events = chrome_trace({"happened": line})["traceEvents"]
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [5, 7]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"happened", "rank 0"}


def test_the_file_is_json(tmp_path: Path) -> None:
    write_trace({"planned": timeline()}, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace({"planned": timeline()})
