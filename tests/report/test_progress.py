"""The progress line: what is known is printed, what is not known is not, and not too often."""

from __future__ import annotations

import io

import pytest

from headway.journal import PlannedBesideHappened
from headway.report.progress import Progress, line


class Clock:
    """A clock that goes on by `step` seconds at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> list[str]:
    return [text for text in stream.getvalue().splitlines() if text.startswith("step")]


def test_everything_that_is_known() -> None:
    text = line(16, loss=2.3142, speed="12.3 K tokens/s", peak_bytes=2**29, bubble=0.04, total=200, left=100.0)
    assert text == "step 17/200  loss 2.314  12.3 K tokens/s  peak 512 MiB  bubble 4%  1 min 40 s left"


def test_what_is_not_known_is_not_printed() -> None:
    assert line(16) == "step 16"


def test_fast_steps_print_about_every_ten_seconds_first_and_last() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock(0.25))
    for step in range(210):
        progress.step(step, loss=1.0, seconds=0.25, total=210)
    progress.close()
    steps = [int(text.split()[1].split("/")[0]) for text in shown(stream)]
    assert steps[0] == 1 and steps[-1] == 210
    assert len(steps) == pytest.approx(210 * 0.25 / 10, abs=2)


def test_slow_steps_print_each() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock(12.0))
    for step in range(4):
        progress.step(step)
    progress.close()
    assert shown(stream) == ["step 0", "step 1", "step 2", "step 3"]


def test_the_last_step_of_an_unknown_number_is_printed_at_the_end() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock(0.001))
    for step in range(10):
        progress.step(step)
    assert shown(stream) == ["step 0"]
    progress.close()
    progress.close()
    assert shown(stream) == ["step 0", "step 9"]


def test_a_stream_that_was_closed_meanwhile_is_left_alone() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock(0.001))
    for step in range(3):
        progress.step(step)
    stream.close()
    progress.close()


def test_time_left_is_steps_left_times_seconds_between_steps() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock(3.0))
    for step in range(5):
        progress.step(step, seconds=1.0, total=25)  # 1 s of compute, 2 s of loading
    progress.close()
    assert shown(stream)[-1] == "step 5/25  1 min left"
    assert "left" not in shown(stream)[0], "one step says nothing about the time between steps"


def test_speed_in_tokens_or_samples() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock(12.0))
    progress.step(0, seconds=0.5, tokens=2000)
    progress.step(1, seconds=0.5, samples=6)
    progress.close()
    assert [text.split("  ")[1] for text in shown(stream)] == ["4 K tokens/s", "12 samples/s"]


def test_planned_beside_happened_after_the_third_step_without_the_first() -> None:
    stream = io.StringIO()
    progress = Progress(planned_seconds=0.2, planned_bytes=100 * 2**20, stream=stream, clock=Clock(1.0))
    every = enumerate((9.0, 0.2, 0.3, 0.4))
    found = [progress.step(step, seconds=s, outside=0.2 * s, peak_bytes=90 * 2**20) for step, s in every]
    progress.close()
    assert found == [None, None, PlannedBesideHappened(2, 0.2, 0.25, 100 * 2**20, 90 * 2**20, 0.05), None]
    (said,) = [text for text in stream.getvalue().splitlines() if "beside" in text]
    assert all(part in said for part in ("200 ms", "250 ms", "+25%", "100 MiB", "90 MiB", "-10%"))
    assert "50 ms of it outside forward_backward" in said


def test_other_ranks_print_nothing_but_compare_too() -> None:
    stream = io.StringIO()
    progress = Progress(rank=1, planned_seconds=0.2, stream=stream, clock=Clock(12.0))
    found = [progress.step(step, loss=1.0, seconds=0.2) for step in range(4)]
    progress.close()
    assert stream.getvalue() == "" and found[2] is not None


@pytest.mark.parametrize("speaks", [True, False])
def test_on_a_terminal_one_line_is_rewritten(speaks: bool) -> None:
    stream = Terminal()
    progress = Progress(planned_seconds=0.2, stream=stream, clock=Clock(0.3))
    for step in range(20):
        progress.step(step, loss=1.0, seconds=0.2, total=20)
        if speaks:
            print("the script's own line")
    progress.close()
    text = stream.getvalue()
    own_lines = 19 if speaks else 0  # after the last step the script prints by itself again
    assert text.count("the script's own line\n") == own_lines
    assert text.count("\n") == own_lines + 2, "the live line stays where it is: planned beside happened, and its end"
    assert "20/20" in text and "planned beside happened" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
