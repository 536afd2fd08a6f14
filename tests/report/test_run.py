"""A run as text: what a person asks of a run that is over, or that failed, is answered from its journals."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import journal
from headway.errors import HeadwayError
from headway.report.run import show_run, timelines_of

MIB = 2**20


def spans(rank: int, start: float) -> tuple[journal.SpanSeen, ...]:
    return (
        journal.SpanSeen(rank, "F", rank, 0, start, start + 1),
        journal.SpanSeen(rank, "B", rank, 0, start + 1, start + 3),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks, each of which wrote its own part of the timeline."""
    books = [journal.Journal(tmp_path, rank) for rank in range(2)]
    books[0].write(journal.RunStarted("train.py", ("--width", "3"), "headway", 2))
    books[0].write(journal.PlanChosen("plan     1 copy of 2 stages", None, 0.5, (100 * MIB, 80 * MIB)))
    for step in range(5):
        for rank, book in enumerate(books):
            seconds = 9.0 if step == 0 else 0.5  # the first one warms up
            peak = (90 + step) * MIB
            metrics = {"accuracy": 0.1 * step}
            book.write(journal.StepDone(step, 5.0 - step, seconds, None, 1000, peak - rank * MIB, 0.25, None, metrics))
    for rank, book in enumerate(books):
        book.write(journal.TimelineSeen(2, spans(0, 0.0) + spans(1, 1.0), spans(rank, 2.0 * rank)))
    books[0].write(journal.PlannedBesideHappened(2, 0.5, 0.6, 100 * MIB, 92 * MIB))
    return tmp_path


def test_what_was_planned_and_what_happened(run: Path) -> None:
    for rank in range(2):
        journal.Journal(run, rank).write(journal.RunEnded())
    text = show_run(run)
    for part in (
        ": done;",
        "train.py --width 3  (2 processes, launcher: headway)",
        "plan     1 copy of 2 stages",
        "step 500 ms planned, 600 ms happened (+20%)",
        "steps 0 to 4: loss 5 -> 1 (lowest 1 at step 4)",
        "step time 500 ms (median), 2 K tokens/s, bubble 25%",
        "accuracy 0 -> 0.4",
        "rank 0  planned 100 MiB, happened 94 MiB",
        "rank 1  planned 80 MiB, happened 93 MiB",
        "rank 1  planned ",
        "planned 4 s, bubble 25%; happened 5 s, bubble 40%",
    ):
        assert part in text, part
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("rank"))


def test_the_ranks_parts_of_a_timeline_are_joined(run: Path) -> None:
    lines = timelines_of(run)
    assert {name: (line.num_ranks, len(line.spans)) for name, line in lines.items()} == {
        "planned": (2, 4),
        "happened": (2, 4),
    }


def test_a_failure_is_shown_cause_before_consequence(run: Path) -> None:
    journal.Journal(run, 0).write(journal.Failed("PeerError", "rank 1 is gone", consequence=True))
    journal.Journal(run, 1).write(journal.Failed("ValueError", "ValueError: bad", "train.py:3", "Traceback\n  here"))
    text = show_run(run)
    assert ": failed;" in text
    assert text.index("rank 1 failed (train.py:3):") < text.index("rank 0 failed, because another rank did:")
    assert text.endswith("Traceback\n  here")


def test_an_end_that_nobody_wrote_down_is_not_called_a_success(run: Path) -> None:
    journal.Journal(run, 0).write(journal.RunEnded())
    assert "not ended, or killed" in show_run(run)


def test_a_loss_that_is_not_known_is_not_printed(tmp_path: Path) -> None:
    journal.Journal(tmp_path, 0).write(journal.StepDone(0))
    assert "steps 0 to 0" in show_run(tmp_path).splitlines()


def test_no_timeline_is_said(tmp_path: Path) -> None:
    journal.Journal(tmp_path, 0).write(journal.StepDone(0))
    with pytest.raises(HeadwayError, match="kept no timeline"):
        timelines_of(tmp_path)
