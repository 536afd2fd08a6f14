"""The first cause among the endings of several ranks, and the words for it in at most twelve lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import journal
from headway.launch.cause import MAX_LINES, Ending, first_cause, report, with_records

OWN = journal.Failed("ValueError", "ValueError: no", "train.py:3", "Traceback", 1)
LOST = journal.Failed(
    "PeerError", "lost rank 2", exit_code=1, consequence=True, waiting="waiting for channel 0->1, 4 s"
)


def test_a_consequence_is_not_the_first_cause_even_when_it_came_first() -> None:
    endings = [Ending(0, 1.0, 1, failed=LOST), Ending(1, 2.0, 1, failed=OWN), Ending(2, 3.0, -15, ended=True)]
    assert first_cause(endings) == endings[1]


def test_a_kill_comes_before_what_follows_from_it() -> None:
    endings = [Ending(0, 2.0, 1, failed=LOST), Ending(1, 1.0, -9)]
    assert first_cause(endings) == endings[1]
    assert endings[1].exit_code == 137


def test_the_earliest_consequence_when_there_is_nothing_else() -> None:
    endings = [Ending(0, 2.0, 1, failed=LOST), Ending(1, 1.0, 1, failed=LOST), Ending(2, 0.5, 0)]
    assert first_cause(endings) == endings[1]


def test_no_cause_when_all_went_well() -> None:
    assert first_cause([Ending(0, 1.0, 0), Ending(1, 1.0, 0)]) is None


def test_records_give_time_and_words(tmp_path: Path) -> None:
    journal.Journal(tmp_path, 1).write(OWN)
    ending = with_records([Ending(0, 5.0, -15, ended=True), Ending(1, 9e18, -15, ended=True)], tmp_path)[1]
    assert ending.failed == OWN and not ending.ended and ending.time < 9e18


def test_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "17"
    directory.mkdir(parents=True)
    journal.Journal(directory, 0).write(journal.StepDone(16))
    endings = [Ending(0, 2.0, 1, failed=LOST), Ending(1, 2.0, 1, failed=LOST), Ending(2, 1.0, 1, failed=OWN)]
    assert report(endings[2], endings, directory).splitlines() == [
        "headway: stopped after step 16. First cause, on rank 2 (train.py:3):",
        "  ValueError: no",
        "Ranks 0, 1 were waiting for rank 2 (channel 0->1, 4 s). Logs: runs/17/",
    ]


@pytest.mark.parametrize("size", [2, 64])
def test_never_more_than_twelve_lines_and_the_remedy_stays(tmp_path: Path, size: int) -> None:
    message = "\n".join(["much to say", *("detail " * 60 for _ in range(50)), "  Try: less"])
    cause = Ending(0, 1.0, 1, failed=journal.Failed("PlanError", message))
    kinds = (
        lambda rank: Ending(rank, 2.0, 1, failed=LOST),
        lambda rank: Ending(rank, 2.0, -15, ended=True),
        lambda rank: Ending(rank, 2.0, 0),
        lambda rank: Ending(rank, 2.0, 7),
    )
    endings = [cause, *(kinds[rank % 4](rank) for rank in range(1, size))]
    lines = report(cause, endings, tmp_path).splitlines()
    assert len(lines) <= MAX_LINES and max(map(len, lines)) <= 160
    assert any("Try: less" in line for line in lines) and "Logs: " in lines[-1]
