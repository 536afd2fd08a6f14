"""Starts a job on this machine, watches it, and ends it as one: the first cause last, its exit code the job's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from headway.errors import HeadwayError
from headway.launch.cause import Ending, first_cause, hint_of, report, with_records
from headway.launch.children import Children, environ_of
from headway.launch.directory import RUNS, make_run_directory, shown
from headway.launch.machine import cores, kills_for_memory

# How long the others may fail by themselves, and say why, after the first rank has: seconds.
_GRACE_AFTER_CAUSE = 0.7
_GRACE_AFTER_CONSEQUENCE = 3.0
_LOOK_EVERY = 0.03


@dataclass(frozen=True)
class Job:
    """What to start: a script, its arguments, and on how many processes. `device_memory` in bytes, deadline seconds."""

    script: Path
    arguments: tuple[str, ...] = ()
    num_processes: int = 1
    device_memory: int | None = None
    name: str | None = None
    deadline: float | None = None
    runs: Path = RUNS


def start(job: Job, *, stream: TextIO | None = None) -> int:
    """Run the job to its end and return its exit code; `stream` (standard error) gets the launcher's own lines.

    The first line about the machine is the plan's, which has measured it (`launch.identity.describe`).
    Raises HeadwayError when it cannot start: no process asked for, no such script, a run of that name.
    """
    stream = sys.stderr if stream is None else stream
    _check(job)
    run_directory = make_run_directory(job.name, job.runs)
    cores_each = max(1, cores() // job.num_processes)
    command = [sys.executable, "-P", "-m", "headway.launch.worker", str(job.script), *job.arguments]
    environs = [
        environ_of(rank, job.num_processes, cores_each, run_directory, job.device_memory, job.deadline)
        for rank in range(job.num_processes)
    ]
    kills_before = kills_for_memory()
    children = Children()
    with _signals() as received:
        try:
            children.start(command, environs, run_directory)
            endings = _watch(children, received, run_directory)
        finally:
            if children.running:
                children.end(patience=0.0)
    _restore_terminal(stream)
    if received:
        number = received[0]
        how = "Ctrl-C" if number == signal.SIGINT else number.name
        print(f"headway: stopped by {how}. Logs: {shown(run_directory)}", file=stream, flush=True)
        return 128 + number
    endings = with_records(endings, run_directory)
    cause = first_cause(endings)
    if cause is None:
        return 0
    kills = kills_before is not None and (kills_for_memory() or 0) > kills_before
    log = f"{shown(run_directory)}rank{cause.rank}.log"
    hint = hint_of(cause, memory_kills=kills, device_memory=job.device_memory, log=log)
    print(report(cause, endings, run_directory, hint=hint), file=stream, flush=True)
    return cause.exit_code


def _check(job: Job) -> None:
    if job.num_processes < 1:
        raise HeadwayError(
            f"{job.num_processes} processes cannot train anything",
            place=f"headway run -n {job.num_processes}",
            remedy=f"-n 1 or more; this machine has {cores()} cores",
        )
    if not job.script.is_file():
        fact = "it is a directory" if job.script.is_dir() else "no such file"
        raise HeadwayError(
            f"the script cannot be run: {fact}",
            place=str(job.script),
            remedy=f"a path from {Path.cwd()}, as in headway run -n {job.num_processes} train.py",
        )
    if job.deadline is not None and not job.deadline > 0:
        raise HeadwayError(
            f"a deadline of {job.deadline:g} seconds leaves no time to wait for anyone",
            place=f"headway run --deadline {job.deadline:g}",
            remedy="seconds above 0; without --deadline it is 300",
        )


def _watch(children: Children, received: list[signal.Signals], run_directory: Path) -> list[Ending]:
    """Wait until all are done, one has failed (then end the rest), or a signal asks to stop."""
    failed_at: float | None = None
    while True:
        endings = children.poll()
        if not children.running:
            return endings
        if received:
            return _stop(children, received)
        if any(not ending.well for ending in endings):
            failed_at = time.monotonic() if failed_at is None else failed_at
            cause = first_cause(with_records(endings, run_directory))
            consequence = cause is not None and cause.failed is not None and cause.failed.consequence
            grace = _GRACE_AFTER_CONSEQUENCE if consequence else _GRACE_AFTER_CAUSE
            if time.monotonic() - failed_at > grace:
                return children.end()
        time.sleep(_LOOK_EVERY)


def _stop(children: Children, received: list[signal.Signals]) -> list[Ending]:
    """Pass the wish to stop on, gently first; a second signal ends everything at once."""
    if received[0] == signal.SIGINT:
        children.interrupt()
        limit = time.monotonic() + 3.0
        while children.running and len(received) == 1 and time.monotonic() < limit:
            children.poll()
            time.sleep(_LOOK_EVERY)
    return children.end(patience=4.0 if len(received) == 1 else 0.0)


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list for as long as the job runs, instead of dying of them."""
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _restore_terminal(stream: TextIO) -> None:
    """Show the cursor again: a progress line that was ended in the middle leaves it hidden."""
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        stream.write("\x1b[?25h\r\x1b[K")
        stream.flush()
