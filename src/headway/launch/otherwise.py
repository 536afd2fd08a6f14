"""Otherwise: the journal of a script that another launcher started, or none: how it began, and how it ended."""

from __future__ import annotations

import atexit
import platform
import sys
from importlib.metadata import version

from headway.journal import Journal, RunEnded, RunStarted
from headway.launch.failure import failure_of


def keep_ends(journal: Journal, launcher: str, size: int) -> None:
    """Write now that the run began, and when Python ends how: what a worker of `headway run` writes by itself.

    The code of a `sys.exit(code)` is not to be seen here; it counts as a good end.
    """
    if journal.rank == 0:
        found = {"torch": version("torch"), "python": platform.python_version()}
        journal.write(RunStarted(sys.argv[0], tuple(sys.argv[1:]), launcher, size, None, found))
    atexit.register(_write_end, journal)


def _write_end(journal: Journal) -> None:
    error = getattr(sys, "last_value", None)  # what Python has printed on its way out
    failed = None if error is None else failure_of(error)
    journal.write(failed or RunEnded(0))
