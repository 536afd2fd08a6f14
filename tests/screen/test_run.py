"""What the terminal shows when a run goes well, and when it is refused before it starts."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from headway import journal
from tests.screen.terminal import environment, headway

GOOD = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "says", *sys.argv[1:], flush=True)
print("threads", os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.several
def test_rank_0_prints_here_and_the_others_into_their_logs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOOD)
    screen = headway(tmp_path, "run", "-n", "2", "--name", "first", "train.py", "--width", "3", "-n", "4")
    assert screen.code == 0
    assert screen.out.splitlines() == ["rank 0 of 2 says --width 3 -n 4", "threads 1"]
    assert (tmp_path / "runs/first/rank1.log").read_text().splitlines()[0] == "rank 1 of 2 says --width 3 -n 4"
    assert screen.err == "", "the launcher has nothing to say of a script that ends well"
    ends = [entry.rank for entry in journal.read(tmp_path / "runs/first") if entry.event == journal.RunEnded(0)]
    assert sorted(ends) == [0, 1]


@pytest.mark.several
def test_an_undistributed_torch_script_finds_the_others_by_the_usual_variables(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(total)\n"
        "print(total.item())\n"
        "dist.destroy_process_group()\n"
    )
    screen = headway(tmp_path, "run", "-n", "2", "train.py")
    assert (screen.code, screen.out) == (0, "3.0\n")
    assert screen.err == "", "no warning of torch's either"


def test_rank_0_has_the_terminal_when_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('terminal:', sys.stdout.isatty())\n")
    ours, theirs = pty.openpty()
    try:
        code = subprocess.run(
            [sys.executable, "-m", "headway", "run", "-n", "1", "train.py"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            timeout=60,
        ).returncode
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert code == 0 and "terminal: True" in shown


@pytest.mark.parametrize(
    ("arguments", "fact", "place", "remedy"),
    [
        (("run", "-n", "0", "train.py"), "0 processes", "-n 0", "-n 1 or more"),
        (("run", "-n", "2", "nowhere.py"), "no such file", "nowhere.py", "train.py"),
        (("run", "-n", "2", "--device-memory", "3 parsec", "train.py"), "parsec", "--device-memory", "512 MiB"),
        (("run", "-n", "2", "--name", "../up", "train.py"), "../up", "--name", "letters"),
        (("show", "runs/17"), "no such run", "runs/NAME", "headway show"),
        (("plan", "--fixed", "pipeline", "train.py"), "pipeline", "--fixed", "pipeline=2"),
    ],
)
def test_refusals_are_fact_place_remedy(
    tmp_path: Path, arguments: tuple[str, ...], fact: str, place: str, remedy: str
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')\n")
    screen = headway(tmp_path, *arguments)
    assert screen.code == 2 and screen.out == ""
    said = screen.err.splitlines()
    assert said[0].startswith("headway: ") and fact in said[0]
    assert place in said[1]
    assert said[2].startswith("  Try: ") and remedy in said[2]
    assert not (tmp_path / "runs").exists() or "--name" in arguments


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "runs/mine").mkdir(parents=True)
    screen = headway(tmp_path, "run", "-n", "1", "--name", "mine", "train.py")
    assert screen.code == 2 and "'mine' exists" in screen.err
