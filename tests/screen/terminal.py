"""Runs `headway ...` as a person would, and keeps what the terminal showed; nothing that it started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
# A launcher around the tests must not be taken for the one under test.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "HEADWAY_LAUNCHER")


@dataclass(frozen=True)
class Screen:
    """What one command printed, its exit code, and how long it took in seconds."""

    out: str
    err: str
    code: int
    seconds: float

    @property
    def failure(self) -> list[str]:
        """The lines from the one that names the first cause to the last."""
        lines = self.err.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("headway: stopped"))
        return lines[first:]


def environment(**more: str) -> dict[str, str]:
    """Give the environment of a fresh shell, with this checkout's package."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {**kept, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **more}


def headway(
    folder: Path,
    *arguments: str,
    deadline: float = 60.0,
    during: Callable[[subprocess.Popen[str]], None] | None = None,
    **more: str,
) -> Screen:
    """Run `headway arguments` in `folder`, call `during` with the process meanwhile, and wait at most `deadline`."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", *arguments],
        cwd=folder,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if during is not None:
            during(process)
        out, err = process.communicate(timeout=deadline)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # the ranks follow: they end with their launcher
            process.communicate()
    screen = Screen(out, err, process.returncode, time.monotonic() - started)
    assert wait_until(lambda: not living(folder), 5.0), f"left behind: {living(folder)}"
    return screen


def living(folder: Path) -> list[int]:
    """List the processes whose command line names a file in `folder`, or that work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                working = os.readlink(entry / "cwd")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if Path(working) == folder.resolve() and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Wait until `true()` holds, at most `seconds`; tell whether it came to hold."""
    limit = time.monotonic() + seconds
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
