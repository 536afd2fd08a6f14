"""Sends: messages that are on their way, with their tensors, until they have gone."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from headway.collective.pending import Pending

LINGER_BYTES = 1 << 20
"""Bytes of messages that may have gone and are kept all the same, until the next flush."""


class Sends:
    """The sends of one channel. gloo's sends cannot be polled, only waited for.

    `wait` does that, and a thread as soon as more than LINGER_BYTES are kept alive: each time that it wakes, whoever
    computes waits for Python's lock.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: deque[tuple[Pending, int]] = deque()
        self._added = self._gone = 0  # bytes; each is written by one thread at a time
        self._draining = threading.Lock()
        self._wake = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, send: Pending, size: int) -> None:
        """Keep a send of so many bytes. Raises what went wrong with an earlier one."""
        if self._error is not None:
            raise self._error
        self._under_way.append((send, size))
        self._added += size
        if self._added - self._gone > LINGER_BYTES:
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"sends of {self._name}", daemon=True)
                self._thread.start()

    def __len__(self) -> int:
        return len(self._under_way)

    def wait(self) -> None:
        """Wait until all have gone. Raises what went wrong with any."""
        with self._draining:
            while self._under_way and self._error is None:
                send, size = self._under_way[0]
                try:
                    send.wait()  # each has a deadline
                except BaseException as error:
                    self._error = error
                    break
                self._under_way.popleft()
                self._gone += size
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with suppress(BaseException):  # kept, and raised to whoever sends or waits next
            while self._wake.wait():
                self._wake.clear()
                self.wait()
