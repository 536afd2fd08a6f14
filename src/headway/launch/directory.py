"""The run's directory, runs/NAME/: made once, also when two launchers start at the same moment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headway.errors import HeadwayError

RUNS = Path("runs")


def make_run_directory(name: str | None = None, runs: Path = RUNS) -> Path:
    """Make `runs`/`name`/ and return its absolute path; without a name the next free number is taken.

    Raises HeadwayError when the name is taken, is not a plain name, or the directory cannot be made.
    """
    if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
        raise HeadwayError(
            f"{name!r} is not a name for a run",
            place="--name",
            remedy="letters, digits, '_', '-', '.', '+', as in --name first-try",
        )
    try:
        runs.mkdir(parents=True, exist_ok=True)
        return _make(name, runs)
    except OSError as error:
        raise HeadwayError(
            f"the run's directory cannot be made: {error.strerror}",
            place=str(runs.absolute()),
            remedy="start where this user may write",
        ) from error


def shown(directory: Path) -> str:
    """Write a directory as a person here would name it: relative when it lies below, with a closing slash."""
    try:
        return str(directory.absolute().relative_to(Path.cwd())) + "/"
    except ValueError:
        return os.path.join(directory, "")


def _make(name: str | None, runs: Path) -> Path:
    if name is not None:
        directory = runs.absolute() / name
        try:
            directory.mkdir()
        except FileExistsError:
            raise HeadwayError(
                f"a run of the name {name!r} exists",
                place=shown(directory),
                remedy="another --name, or none: the next free number is taken",
            ) from None
        return directory
    number = 1 + max((int(path.name) for path in runs.iterdir() if path.name.isdigit()), default=0)
    while True:  # mkdir either makes the directory or fails: of two launchers, one goes on to the next number
        directory = runs.absolute() / str(number)
        try:
            directory.mkdir()
            return directory
        except FileExistsError:
            number += 1
