"""One rank: `python -m headway.launch.worker script.py args...` runs the script, and writes down why it failed."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import platform
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from headway.journal import Journal, RunEnded, RunStarted
from headway.launch.failure import failure_of
from headway.launch.identity import Identity, identify, listening_socket
from headway.launch.limit import lift_limit, limit_memory

# How long Python may take to leave after a failure, before the kernel ends it: seconds.
_LEAVE_WITHIN = 5


def main(arguments: Sequence[str]) -> int:
    """Run the script as __main__ and return the exit code of this rank."""
    _end_with_launcher()
    identity = identify()
    script, *rest = arguments
    _print_lines_at_once()
    with _log_of(identity) as log:
        # A crash, or SIGTERM from the launcher, leaves the stack in the log: where this rank was waiting.
        faulthandler.enable(file=log, all_threads=False)
        faulthandler.register(signal.SIGTERM, file=log, all_threads=False, chain=True)
        try:
            return _run(identity, script, rest, log)
        finally:
            faulthandler.unregister(signal.SIGTERM)
            faulthandler.disable()


def _run(identity: Identity, script: str, arguments: Sequence[str], log: TextIO) -> int:
    journal = Journal(identity.run_directory, identity.rank)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    store = None
    if identity.rank == 0:
        found = {"torch": version("torch"), "python": platform.python_version()}
        started = RunStarted(script, tuple(arguments), identity.launcher, identity.size, identity.device_memory, found)
        journal.write(started)
    try:
        if identity.size > 1:
            store = _host_meeting_point(identity)
        if identity.device_memory is not None:
            limit_memory(identity.device_memory, identity)
        runpy.run_path(script, run_name="__main__")
        failed = None
    except BaseException as error:  # sys.exit and Ctrl-C too: each has its exit code and its words
        if identity.device_memory is not None:
            lift_limit()
        failed = failure_of(error, device_memory=identity.device_memory)
        if failed is not None:
            journal.write(failed)
            log.write(failed.traceback or failed.message + "\n")
            log.flush()
    if failed is None:
        journal.write(RunEnded(0))
        return 0
    # Leaving can hang in a library whose peer is gone; everything is written by now.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVE_WITHIN)
    del store
    return failed.exit_code


def _host_meeting_point(identity: Identity) -> object | None:
    """On rank 0, open torch's store on the socket that the launcher has reserved; the script's own then shares it."""
    descriptor = listening_socket()
    if descriptor is None or identity.master_address is None or identity.master_port is None:
        return None
    import torch.distributed as dist

    return dist.TCPStore(
        identity.master_address,
        identity.master_port,
        identity.size,
        is_master=True,
        timeout=datetime.timedelta(seconds=identity.deadline or 300.0),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def _print_lines_at_once() -> None:
    """Make each printed line visible when it is printed, on a pipe and in a log too."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _log_of(identity: Identity) -> TextIO:
    """Open rankN.log. For ranks other than 0 it also holds what they print."""
    if identity.run_directory is None:
        return open(os.devnull, "a")
    return (identity.run_directory / f"rank{identity.rank}.log").open("a", encoding="utf-8", errors="backslashreplace")


def _end_with_launcher() -> None:
    """Ask the kernel to end this process when the launcher dies, however it dies (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
