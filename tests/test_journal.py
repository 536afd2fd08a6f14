"""The journal: every event comes back as it was written, also when a process was killed in the middle of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import journal
from headway.errors import HeadwayError

EVENTS = (
    journal.RunStarted("train.py", ("--layers", "4"), "headway", 2, 2**29, {"torch": "2.13.0"}),
    journal.PlanChosen("data 2", 'data = "2"', 0.5, (10, 20)),
    journal.Verified("loss and gradients", 1e-12, True),
    journal.StepDone(3, 2.5, 0.25, samples=12, tokens=4096, peak_bytes=7, metrics={"accuracy": 0.5}),
    journal.StepDone(4),
    journal.PlannedBesideHappened(3, 0.5, 0.6, 10, 11),
    journal.TimelineSeen(
        3, (journal.SpanSeen(0, "F", 0, 0, 0.0, 1.0),), (journal.SpanSeen(1, "SEND", 1, 2, 0.5, 0.7, 0),)
    ),
    journal.Failed("ValueError", "no\nsuch thing", "train.py:3", "Traceback ...", 1, True, 4),
    journal.RunEnded(0),
)


def test_every_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    book = journal.Journal(tmp_path, 1)
    for event in EVENTS:
        book.write(event)
    entries = journal.read(tmp_path)
    assert tuple(entry.event for entry in entries) == EVENTS
    assert {entry.rank for entry in entries} == {1}


def test_ranks_are_merged_in_order_of_time(tmp_path: Path) -> None:
    books = [journal.Journal(tmp_path, rank) for rank in range(2)]
    for step in range(4):
        books[step % 2].write(journal.StepDone(step))
    assert [entry.rank for entry in journal.read(tmp_path)] == [0, 1, 0, 1]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    book = journal.Journal(tmp_path, 0)
    book.write(journal.StepDone(0))
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"time": 3, "ra')
    assert [entry.event for entry in journal.read(tmp_path)] == [journal.StepDone(0)]


def test_a_damaged_line_is_refused_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text('{"time": 1, "rank": 0, "event": "Nonsense"}\n')
    with pytest.raises(HeadwayError, match=r"rank0\.jsonl:1"):
        journal.read(tmp_path)


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no such run"):
        journal.read(tmp_path / "17")


def test_without_a_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal.Journal(None, 0).write(journal.StepDone(0))
    assert list(tmp_path.iterdir()) == []
