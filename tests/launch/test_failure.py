"""An exception becomes a record: its words, the user's line, its exit code, and whether another rank was the cause."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable

import pytest
import torch

from headway.errors import PlanError, RankError
from headway.journal import Failed
from headway.launch.failure import failure_of, is_consequence


def record(action: Callable[[], object], **settings: int) -> Failed | None:
    try:
        action()
    except BaseException as error:
        return failure_of(error, **settings)
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], object]:
    def throw() -> None:
        raise error

    return throw


def test_the_place_is_the_users_line_not_the_librarys() -> None:
    failed = record(lambda: json.loads("{"))
    assert failed is not None and failed.place is not None
    assert "test_failure.py" in failed.place and "json" not in failed.place
    assert failed.message.startswith("JSONDecodeError: ")
    assert failed.traceback is not None and "json/decoder.py" in failed.traceback


@pytest.mark.parametrize(("code", "expected"), [(3, 3), ("words", 1), (256, 1), (-1, 255)])
def test_sys_exit_keeps_its_code(code: object, expected: int) -> None:
    failed = record(lambda: sys.exit(code))  # type: ignore[arg-type]
    assert failed is not None and failed.exit_code == expected


@pytest.mark.parametrize("code", [None, 0])
def test_a_good_exit_is_no_failure(code: object) -> None:
    assert record(lambda: sys.exit(code)) is None  # type: ignore[arg-type]


def test_a_refusal_is_said_in_its_own_words() -> None:
    error = PlanError("does not fit", place="stage 1", remedy="more memory")
    failed = record(raising(error))
    assert failed is not None and (failed.message, failed.kind) == (str(error), "PlanError")


def test_a_real_allocation_that_fails_names_what_was_wanted() -> None:
    failed = record(lambda: torch.empty(2**52, dtype=torch.uint8), device_memory=2**29)
    assert failed is not None and failed.kind == "OutOfMemory"
    assert "4 PiB" in failed.message.replace("4096 TiB", "4 PiB") and "512 MiB" in failed.message


def test_python_running_out_of_memory_is_out_of_memory() -> None:
    failed = record(raising(MemoryError()))
    assert failed is not None and failed.kind == "OutOfMemory" and "Try:" in failed.message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RankError("rank 1 did not answer", place="waiting for an all-reduce, 3.0 s"), True),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("shapes do not match"), False),
        (ConnectionRefusedError("Connection refused"), False),  # the script's own network, not the ranks'
        (PlanError("no plan"), False),
    ],
)
def test_consequences(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected


def test_an_error_may_say_itself_that_it_is_a_consequence() -> None:
    kind = types.new_class("Lost", (Exception,), exec_body=lambda space: space.update(consequence=True))
    assert is_consequence(kind("lost"))


def test_what_a_rank_waited_for_is_kept() -> None:
    failed = record(raising(RankError("rank 1 is late", place="waiting for channel 0->1, 4 s")))
    assert failed is not None and failed.consequence and failed.waiting == "waiting for channel 0->1, 4 s"


def test_notes_come_after_the_fact() -> None:
    error = ValueError("no")
    error.add_note("stage 1 of 2, module block.6")
    failed = record(raising(error))
    assert failed is not None and failed.message.splitlines() == ["ValueError: no", "stage 1 of 2, module block.6"]
