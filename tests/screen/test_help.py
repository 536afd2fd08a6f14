"""The command line answers at once: without torch, and in under 0.3 seconds of CPU."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from headway import journal
from tests.screen.terminal import environment

LOADED = """
import sys
from headway.cli import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


def cpu_seconds(folder: Path, *arguments: str) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.mark.parametrize("what", ["help", "show"])
def test_answers_at_once_and_without_torch(tmp_path: Path, what: str) -> None:
    book = journal.Journal(tmp_path, 0)
    book.write(journal.StepDone(0, 2.0, 0.1))
    span = (journal.SpanSeen(0, "F", 0, 0, 0.0, 1.0),)
    book.write(journal.TimelineSeen(0, span, span))
    arguments = ("--help",) if what == "help" else ("show", str(tmp_path))
    runs = [cpu_seconds(tmp_path, *arguments) for _ in range(3)]
    assert {out.splitlines()[-1] for _, out in runs} == {"False"}, "torch was imported"
    assert min(seconds for seconds, _ in runs) < 0.3


def test_help_names_every_verb(tmp_path: Path) -> None:
    _, out = cpu_seconds(tmp_path, "--help")
    for verb in ("plan", "run", "show", "doctor"):
        assert f"  {verb} " in out
