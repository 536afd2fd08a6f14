"""What the terminal shows when a run fails: the first cause last, at most twelve lines, and its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from headway import journal
from tests.screen.terminal import Screen, headway, living, wait_until

pytestmark = pytest.mark.several

# Both ranks say that they are there before one of them fails, so that the other is surely at work.
TOGETHER = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path(f"here{rank}").touch()
while not all(Path(f"here{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
"""


def fail(folder: Path, text: str, *options: str, deadline: float = 60.0) -> Screen:
    (folder / "train.py").write_text(TOGETHER + text)
    screen = headway(folder, "run", "-n", "2", *options, "train.py", deadline=deadline)
    assert len(screen.failure) <= 12, screen.failure
    assert "Traceback" not in screen.out + screen.err
    assert screen.failure[-1].endswith("Logs: runs/1/")
    return screen


def test_an_exception_on_one_rank_is_named_with_its_line(tmp_path: Path) -> None:
    text = "def load():\n    if rank == 1:\n        raise ValueError('no such shard')\n    time.sleep(300)\nload()\n"
    line = (TOGETHER + text).splitlines().index("        raise ValueError('no such shard')") + 1
    screen = fail(tmp_path, text)
    assert screen.code == 1
    assert screen.failure[0] == f"headway: stopped. First cause, on rank 1 (train.py:{line}, in load):"
    assert screen.failure[1].strip() == "ValueError: no such shard"
    assert "Rank 0 was ended." in screen.failure[-1]
    assert screen.seconds < 30
    log = (tmp_path / "runs/1/rank1.log").read_text()
    assert "Traceback" in log and "train.py" in log and "runpy" not in log
    failed = [entry for entry in journal.read(tmp_path / "runs/1") if isinstance(entry.event, journal.Failed)]
    assert [entry.rank for entry in failed] == [1]


def test_rank_0_does_not_flood_the_terminal_either(tmp_path: Path) -> None:
    text = "def f(n):\n    return f(n - 1) if n else 1 / 0\nif rank == 0:\n    f(50)\ntime.sleep(300)\n"
    screen = fail(tmp_path, text)
    assert screen.code == 1
    assert "on rank 0" in screen.failure[0] and "ZeroDivisionError" in screen.failure[1]
    assert "Traceback" in (tmp_path / "runs/1/rank0.log").read_text()


def test_sys_exit_gives_its_own_code(tmp_path: Path) -> None:
    screen = fail(tmp_path, "if rank == 1:\n    sys.exit(3)\ntime.sleep(300)\n")
    assert screen.code == 3
    assert "on rank 1" in screen.failure[0] and "sys.exit(3)" in screen.failure[1]


def test_a_killed_rank_is_named_by_its_signal(tmp_path: Path) -> None:
    screen = fail(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(300)\n")
    assert screen.code == 128 + signal.SIGKILL
    assert "on rank 1" in screen.failure[0] and "SIGKILL" in screen.failure[1]


def test_os_exit_leaves_its_code(tmp_path: Path) -> None:
    screen = fail(tmp_path, "if rank == 1:\n    os._exit(5)\ntime.sleep(300)\n")
    assert screen.code == 5
    assert "on rank 1" in screen.failure[0] and "exit code 5" in screen.failure[1]


def test_the_same_error_on_every_rank_is_said_once(tmp_path: Path) -> None:
    screen = fail(tmp_path, "raise KeyError('width')\n")
    assert screen.code == 1
    assert "on ranks 0, 1 (train.py:" in screen.failure[0]
    assert sum("KeyError" in line for line in screen.failure) == 1


def test_a_lost_connection_is_not_the_first_cause(tmp_path: Path) -> None:
    """The rank that waits fails by torch's 'connection closed'; the cause is the other's exception."""
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == 1:
    raise RuntimeError("the disk is full\\n" + "\\n".join(f"detail {n}" for n in range(40)))
dist.all_reduce(torch.ones(1))
"""
    screen = fail(tmp_path, text)
    assert screen.code == 1
    assert "on rank 1" in screen.failure[0] and "the disk is full" in screen.failure[1]
    assert "Rank 0 was" in screen.failure[-1]


def test_out_of_memory_names_the_budget(tmp_path: Path) -> None:
    text = """
import torch
def allocate(mib):
    return torch.ones(mib * 2**18)
for _ in range(10):
    kept = allocate(200)  # comes and goes: within the budget each time
    del kept
if rank == 1:
    allocate(300)
time.sleep(300)
"""
    screen = fail(tmp_path, text, "--device-memory", "256 MiB", deadline=90.0)
    assert screen.code == 1
    assert "on rank 1 (train.py:" in screen.failure[0] and "in allocate" in screen.failure[0]
    assert "out of memory" in screen.failure[1]
    assert "300 MiB" in screen.failure[1] and "256 MiB" in screen.failure[1]
    assert any(line.strip().startswith("Try:") for line in screen.failure)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Rank 1 refuses SIGTERM and Ctrl-C: the launcher must insist. Its child must go too.
    (tmp_path / "train.py").write_text(
        TOGETHER + "import signal, subprocess\n"
        "if rank == 1:\n"
        "    for name in ('SIGINT', 'SIGTERM'):\n"
        "        signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "Path(f'ready{rank}').touch()\n"
        "time.sleep(300)\n"
    )

    def interrupt(process: subprocess.Popen[str]) -> None:
        assert wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), 30)
        process.send_signal(number)

    screen = headway(tmp_path, "run", "-n", "2", "train.py", during=interrupt)
    assert screen.code == code
    assert screen.failure == [f"headway: stopped by {'Ctrl-C' if code == 130 else 'SIGTERM'}. Logs: runs/1/"]


def test_the_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOGETHER + "Path(f'ready{rank}').touch()\ntime.sleep(300)\n")

    def kill(process: subprocess.Popen[str]) -> None:
        assert wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), 30)
        assert len(living(tmp_path)) == 3
        os.kill(process.pid, signal.SIGKILL)

    assert headway(tmp_path, "run", "-n", "2", "train.py", during=kill).code == -signal.SIGKILL
