"""What a person sees of a training run: the machine, the plan, progress, plan beside reality, and refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway import journal
from tests.screen.terminal import environment, headway

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples" / "gpt.py")
SMALL = ("--layers", "3", "--width", "32", "--heads", "2", "--context", "16", "--batch", "4", "--sample", "3")

# A script that a test completes: {model} and {loss} differ.
SCRIPT = """
import torch, headway
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
x, y = torch.randn(12, 8), torch.randn(12, 1)
def loss(model, batch):
    return {loss}
plan = headway.plan(model, loss, {batch}, fixed={fixed})
model = headway.parallelize(model, loss, plan)
for step, batch in enumerate(model.batches([(x, y)] * 2)):
    {inside}
    value = model.forward_backward(batch)
if model.is_main:
    print("trained", float(value))
"""
GOOD = {
    "loss": "((model(batch[0]) - batch[1]) ** 2).mean()",
    "batch": "(x, y)",
    "fixed": "None",
    "inside": "pass",
}


def script(folder: Path, **changes: str) -> Path:
    """Write SCRIPT with some of its places filled differently."""
    path = folder / "train.py"
    path.write_text(SCRIPT.format(**{**GOOD, **changes}))
    return path


@pytest.mark.several
def test_a_run_from_the_first_line_to_the_last(tmp_path: Path) -> None:
    screen = headway(tmp_path, "run", "-n", "2", GPT, *SMALL, "--steps", "5", deadline=110)
    assert screen.code == 0, screen.err
    assert screen.err == ""
    lines = screen.out.splitlines()
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step 1/5"))
    assert first_step <= 15
    machine = lines[0]
    assert "2 cpu processes" in machine and "each" in machine and "links" in machine and "headway run" in machine
    plan = "\n".join(lines[1:first_step])
    for word in ("plan", "why", "expect", "instead", "binds", "a step", "MiB"):
        assert word in plan
    assert re.search(r"loss \d.*tokens/s.*peak \d.*bubble \d+%", lines[first_step])
    beside = [line for line in lines if line.startswith("planned beside happened: step")]
    assert len(beside) == 1 and "peak memory" in beside[0]
    assert any("bits per held-out byte" in line for line in lines)
    assert "headway show" in lines[-1] and "runs/1" in lines[-1]
    shown = headway(tmp_path, "show", "runs/1")
    assert shown.code == 0 and "planned" in shown.out and "happened" in shown.out and "F0" in shown.out


@pytest.mark.several
def test_a_plan_for_another_machine_starts_no_process_and_sees_its_memory(tmp_path: Path) -> None:
    options = (*SMALL[:2], "--width", "256", *SMALL[4:])
    roomy = headway(tmp_path, "plan", GPT, "--cluster", "4xcpu:1GiB", *options)
    tight = headway(tmp_path, "plan", GPT, "--cluster", "4xcpu:64MiB", *options)
    assert (roomy.code, tight.code) == (0, 0), roomy.err + tight.err
    assert "a whole model does not fit" not in roomy.out and "a step" in roomy.out
    assert "a whole model does not fit" in tight.out and "stages" in tight.out.splitlines()[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.several
def test_too_little_memory_for_copies_trains_on_a_split_model(tmp_path: Path) -> None:
    # AdamW keeps four times the parameters, 48 MiB, beside some 35 MiB for the runtime
    options = ("--layers", "4", "--width", "256", *SMALL[4:])
    limit = ("--device-memory", "80MiB")
    screen = headway(tmp_path, "run", "-n", "2", *limit, GPT, *options, "--steps", "4", deadline=110)
    assert screen.code == 0, screen.out + screen.err
    assert "a whole model does not fit" in screen.out
    assert "2 stages" in screen.out
    chosen = [entry.event for entry in journal.read(tmp_path / "runs/1") if isinstance(entry.event, journal.PlanChosen)]
    assert chosen and chosen[0].toml is not None and "pipeline = 2" in chosen[0].toml
    assert "4/4" in screen.out


@pytest.mark.several
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": "(x, y[:5])"}, ("batch[1]", "5 rows", "12 samples", "headway.Shared")),
        ({"loss": "(model(batch[0]) - batch[1]) ** 2"}, ("shape [", "not a scalar", "Mean")),
        ({"fixed": "{'pipeline': 9}"}, ("pipeline=9", "9 processes", "2 processes", "headway run -n 9")),
        ({"fixed": "{'stages': 2}"}, ("'stages'", "no decision", "pipeline")),
        ({"fixed": "{'schedule': 'zigzag'}"}, ("'zigzag'", "one_f_one_b")),
        ({"fixed": "{'micro_batch': 0}"}, ("micro_batch", "0")),
        ({"inside": "assert not (model.world.rank == 1 and step == 1), 'bad sample'"}, ("rank 1", "bad sample")),
    ],
    ids=["batch leaf", "loss", "pipeline", "unknown decision", "schedule", "micro_batch", "one rank raises"],
)
def test_refusals_name_fact_place_and_remedy(tmp_path: Path, changes: dict[str, str], said: tuple[str, ...]) -> None:
    script(tmp_path, **changes)
    screen = headway(tmp_path, "run", "-n", "2", "train.py")
    assert screen.code != 0
    assert len(screen.err.splitlines()) <= 12, screen.err
    assert "Traceback" not in screen.out + screen.err
    for part in said:
        assert part in screen.err, f"{part!r} is not in:\n{screen.err}"


@pytest.mark.several
def test_a_plan_file_of_another_model_is_refused(tmp_path: Path) -> None:
    made = headway(tmp_path, "plan", str(script(tmp_path)), "--cluster", "1xcpu:1GiB", "--save", "plan.toml")
    assert made.code == 0, made.err
    text = script(tmp_path).read_text().replace("nn.Linear(16, 16)", "nn.Linear(16, 16, bias=False)")
    text = text.replace("plan = headway.plan(model, loss, (x, y), fixed=None)", "plan = headway.Plan.load('plan.toml')")
    (tmp_path / "train.py").write_text(text)
    screen = headway(tmp_path, "run", "-n", "1", "train.py")
    assert screen.code == 1
    assert "another model" in screen.err and "plan again" in screen.err and "2.bias" in screen.err


@pytest.mark.several
def test_a_plan_file_trains(tmp_path: Path) -> None:
    made = headway(
        tmp_path, "plan", str(script(tmp_path)), "--cluster", "2xcpu:1GiB", "--fixed", "pipeline=2", "--save", "p.toml"
    )
    assert made.code == 0, made.err
    text = script(tmp_path).read_text()
    text = text.replace("plan = headway.plan(model, loss, (x, y), fixed=None)", "plan = headway.Plan.load('p.toml')")
    (tmp_path / "train.py").write_text(text)
    split = headway(tmp_path, "run", "-n", "2", "train.py")
    whole = headway(tmp_path, "run", "-n", "1", str(script(tmp_path)))
    assert (split.code, whole.code) == (0, 0), split.err + whole.err
    value = [float(screen.out.splitlines()[-1].removeprefix("trained ")) for screen in (split, whole)]
    assert value[0] == pytest.approx(value[1], rel=1e-6)


@pytest.mark.several
def test_torchrun_starts_the_same_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--standalone", str(script(tmp_path))]
    given = environment() | {"HEADWAY_RUN_DIRECTORY": "kept/here"}
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 1
    assert "started by torchrun; kept/here/" in done.stdout
    shown = headway(tmp_path, "show", "kept/here")
    assert "kept/here: done" in shown.out and "train.py  (2 processes, launcher: torchrun)" in shown.out
    assert "plan" in shown.out and {path.name for path in tmp_path.iterdir()} == {"kept", "train.py"}


@pytest.mark.parametrize("kept", [False, True])
def test_a_script_by_itself_keeps_a_journal_where_it_is_told_to(kept: bool, tmp_path: Path) -> None:
    given = environment() | ({"HEADWAY_RUN_DIRECTORY": str(tmp_path / "mine")} if kept else {})
    path = script(tmp_path, inside="model.log(step); assert step < 1, 'no further'")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "no further" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"} | ({"mine"} if kept else set())
    if kept:
        shown = headway(tmp_path, "show", "mine")
        assert "mine: failed" in shown.out and "(1 process, launcher: alone)" in shown.out
        assert "AssertionError: no further" in shown.out
