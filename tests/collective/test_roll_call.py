"""Roll calls: who does not answer is named, else who is at work; a place that is not there is no reason to hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from headway.collective.roll_call import PATIENCE, POLL, Board, FileBoard, RollCall, StoreBoard


def boards(kind: str, folder: Path) -> tuple[object, Callable[[], Board]]:
    """Return what must be kept, and what opens a board."""
    if kind == "files":
        return None, lambda: FileBoard(folder)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, lambda: StoreBoard("127.0.0.1", store.port)


@pytest.mark.parametrize("kind", ["files", "store"])
def test_who_is_silent_or_at_work_is_named(kind: str, tmp_path: Path) -> None:
    kept, opened = boards(kind, tmp_path)
    calls = [RollCall(rank, 3, opened) for rank in (0, 1)]
    try:
        assert calls[0].blame([1, 2], "lost") == {2: "gives no sign of life"}
        third = RollCall(2, 3, opened)  # comes, and sees the alarm
        found = calls[0].blame([2], "late")
        assert list(found) == [2] and "test_roll_call.py" in found[2] and "in test_who_is_silent" in found[2]
        third.close()
    finally:
        for call in calls:
            call.close()
    assert kept is None or isinstance(kept, dist.TCPStore)


def test_without_a_board_nobody_is_named() -> None:
    def nowhere() -> Board:
        return StoreBoard("127.0.0.1", 1)

    started = time.monotonic()
    call = RollCall(0, 2, nowhere)
    assert call.blame([1], "lost") == {}
    call.close()
    assert time.monotonic() - started < 2 * PATIENCE + 4 * POLL
