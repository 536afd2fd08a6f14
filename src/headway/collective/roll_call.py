"""Roll call: when a wait on several ranks fails, each says whether it is there and what it does, so that one is named.

    rank 0   waits for an all-reduce ... the deadline passes: raises the alarm
    rank 1   (stopped: says nothing)                                        -> it is rank 1
    rank 2   sees the alarm from a thread: "waiting for an all-reduce"

Who says nothing is dead or stopped; if all answer, who is not waiting is at work, and says where. The ranks write in
the place where they met: files in the run's directory, or the store at the launcher's address. Whoever waits for a
collective hears the alarm too, and ends: gloo does not always tell.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

POLL = 0.5
"""Seconds between two looks for an alarm."""

PATIENCE = 2.0
"""Seconds that a rank has to answer an alarm."""

ALARM = "alarm"
HERE = Path(__file__).parent
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True, slots=True)
class Alarm:
    """What another rank's wait ended with ("late" or "lost"), and when this rank heard of it (`time.monotonic`)."""

    kind: str
    heard: float


class Board(Protocol):
    """Where ranks leave short texts for each other."""

    def write(self, key: str, text: str) -> None:
        """Leave a text."""
        ...

    def read(self, key: str) -> str | None:
        """Return a text, None when there is none."""
        ...


class FileBoard:
    """Files in a directory that all ranks see."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, key: str, text: str) -> None:
        """Leave a text."""
        draft = self._directory / f".{key}-{time.monotonic_ns()}"
        draft.write_text(text)
        draft.replace(self._directory / f"roll-call-{key}")

    def read(self, key: str) -> str | None:
        """Return a text."""
        path = self._directory / f"roll-call-{key}"
        return path.read_text() if path.exists() else None


class StoreBoard:
    """A connection of its own to the store at an address."""

    def __init__(self, address: str, port: int) -> None:
        self._store = dist.TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=PATIENCE), wait_for_workers=False
        )

    def write(self, key: str, text: str) -> None:
        """Leave a text."""
        self._store.set(f"headway/roll-call/{key}", text)

    def read(self, key: str) -> str | None:
        """Return a text."""
        name = f"headway/roll-call/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None


class RollCall:
    """Answers alarms from a thread, and raises them. `open_board` is called on that thread, and may fail."""

    def __init__(self, rank: int, size: int, open_board: Callable[[], Board]) -> None:
        self._rank = rank
        self._others = tuple(other for other in range(size) if other != rank)
        self._open = open_board
        self.alarm: Alarm | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roll call", daemon=True)
        self._thread.start()

    def blame(self, awaited: Iterable[int], kind: str) -> Mapping[int, str]:
        """Raise the alarm ("late" or "lost"); return the ranks that a failed wait leads to, with what they do.

        Those of all ranks that do not answer, else those of the `awaited`, else of all, that are not waiting
        themselves; none when that cannot be known. Takes at most PATIENCE + POLL seconds.
        """
        answers: dict[int, str] = {}
        # A store whose process is stopped never answers: it is asked from a thread that can be left behind.
        asking = threading.Thread(target=self._ask, args=(answers, kind), name="roll call, asking", daemon=True)
        asking.start()
        asking.join(PATIENCE + POLL)
        if self._rank not in answers:
            return {}
        silent = [rank for rank in self._others if rank not in answers]
        if silent:
            return dict.fromkeys(silent, "gives no sign of life")
        at_work = {rank: answers[rank] for rank in self._others if not answers[rank].startswith("waits")}
        asked = set(awaited)
        return {rank: text for rank, text in at_work.items() if rank in asked} or at_work

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * POLL)

    def _ask(self, answers: dict[int, str], kind: str) -> None:
        with suppress(Exception):
            board = self._open()
            board.write(ALARM, kind)
            answers[self._rank] = "asks"
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and len(answers) <= len(self._others):
                for rank in self._others:
                    if rank not in answers and (text := board.read(str(rank))) is not None:
                        answers[rank] = text
                time.sleep(POLL / 10)

    def _watch(self) -> None:
        with suppress(Exception):
            board = self._open()
            while not self._over.wait(POLL):
                if (kind := board.read(ALARM)) is not None:
                    self.alarm = Alarm(kind, time.monotonic())
                    board.write(str(self._rank), what_main_does())
                    return


def what_main_does() -> str:
    """Say what this process's main thread does: "waits" for another rank, or "is at train.py:31, in loss"."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().split("\n\n")
    mine = f"0x{threading.main_thread().ident or 0:016x} "
    for path, line, name in FRAME.findall(next((text for text in threads if mine in text), "")):
        folder = Path(path).parent
        if folder == HERE and name in ("wait", "receive", "flush"):
            return "waits"
        if HERE.parent not in (folder, *folder.parents) and not any(
            part.startswith("python3") for part in folder.parts
        ):
            return f"is at {Path(path).name}:{line}, in {name}"
    return "is at a place unknown"
