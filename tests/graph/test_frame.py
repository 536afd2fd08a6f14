"""Frames: events of a run that does more, less or something else are found again where they were recorded."""

from __future__ import annotations

from headway.graph.frame import Frame, call_key
from headway.graph.model import BETWEEN, Position


def keys(text: str) -> list[str]:
    """Write calls as "function/dims" or "function:weight/dims"."""
    return [call_key(name.split(":")[0], int(dims), name.partition(":")[2]) for name, dims in
            (word.split("/") for word in text.split())]  # fmt: skip


def places(recorded: str, run: str) -> list[Position]:
    """Give the places of a run's calls in a frame at the top, beside those of a recorded run."""
    frame = Frame((), "", {}, [keys(recorded)])
    found = []
    for key in keys(run):
        position = frame.next_event(key)
        frame.happened(position)
        found.append(position)
    return found


def test_the_same_calls_stand_where_they_were_recorded() -> None:
    assert places("a/2 b/2 c/2", "a/2 b/2 c/2") == [(0, 1), (0, 2), (0, 3)]


def test_a_call_more_stands_behind_the_last_and_shifts_nothing() -> None:
    assert places("a/2 b/2 c/2", "a/2 x/2 y/2 b/2") == [(0, 1), (0, 1, BETWEEN, 1), (0, 1, BETWEEN, 2), (0, 2)]


def test_a_call_less_is_passed_by() -> None:
    assert places("a/2 mask/2 c/2 d/2", "a/2 c/2 d/2") == [(0, 1), (0, 3), (0, 4)]


def test_far_ahead_only_a_row_of_calls_is_believed() -> None:
    many = " ".join(
        ["a/2", *(f"x{i}/2" for i in range(20)), "mul/2 to/2", *(f"y{i}/2" for i in range(20)), "mul/2 to/2"]
    )
    assert places(many, "a/2 mul/2 x0/2")[1:] == [(0, 1, BETWEEN, 1), (0, 2)]


def test_a_parameter_tells_a_call_wherever_it_is() -> None:
    many = " ".join(["a/2", *(f"x{i}/2" for i in range(20)), "linear:w/2 b/2"])
    assert places(many, "a/2 linear:w/2")[1] == (0, 22)
    assert len(places(many, "a/2 linear:v/2")[1]) == 4


def test_a_loop_may_go_round_more_often_or_less() -> None:
    assert places("f/2 g/2 f/2 g/2 end/2", "f/2 g/2 end/2") == [(0, 1), (0, 2), (0, 5)]
    longer = places("f/2 g/2 end/2", "f/2 g/2 f/2 g/2 end/2")
    assert longer[:2] + longer[4:] == [(0, 1), (0, 2), (0, 3)]
    assert longer[2:4] == [(0, 2, BETWEEN, 1), (0, 2, BETWEEN, 2)]


def test_values_with_a_dim_more_are_known_by_what_is_done_to_them() -> None:
    assert places("a/2 b/2 c/2", "a/3 b/3 c/3") == [(0, 1), (0, 2), (0, 3)]


def test_turns_count_the_draws_that_come_whatever_was_recorded() -> None:
    frame = Frame((1, 0), "", {("m", 0): (1, 0)}, [keys("a/2"), keys("b/2")], (4, 0))
    turns = []
    for key in keys("x/2 draw/2 a/2 draw/2"):
        if key.startswith("draw"):
            frame.draw()
            turns.append(frame.turn)
        frame.happened(frame.next_event(key))
    frame.next_module("other")
    frame.draw()
    turns.append(frame.turn)
    assert turns == [(4, 0, 0, 1), (4, 0, 0, 2), (4, 0, 1, 1)]
