"""headway checkpoint: inspect prints without torch, export writes what load_state_dict takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import headway
from headway.checkpoint.export import export
from headway.checkpoint.inspect import inspect
from headway.cli import headway as command
from headway.errors import CheckpointError
from headway.units import format_bytes
from tests.checkpoint.training import build, loss, optimizer_of
from tests.screen.terminal import environment


def saved(directory: Path) -> torch.nn.Module:
    model = build()
    optimizer = optimizer_of("adamw", model)
    loss(model, (torch.arange(11), torch.arange(11))).backward()
    optimizer.step()
    headway.save(directory, model, optimizer, step=1000, history=list(range(50)))
    return model


def test_inspect_says_what_is_there_without_torch(tmp_path: Path) -> None:
    model = saved(tmp_path / "out")
    script = "import sys; from headway.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "checkpoint", "inspect", "out"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines.pop() == "False", done.stderr
    text = "\n".join(lines)
    assert lines[0] == "checkpoint out"
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert f"model      {parameters} parameters in 15 tensors, 7 buffers: " in text
    assert format_bytes(parameters * 8 + buffers) in lines[2]
    assert "tied       head.weight is embed.weight" in text
    assert "optimizer  AdamW; " in text and "exp_avg, exp_avg_sq" in text
    assert "group 1  9 parameters: weight_decay 0.0, lr 0.03, betas [0.9, 0.999]" in text
    assert "extra      step = 1000" in text and "..." in text
    assert "embed.weight                  float64 [11, 8]" in text


def test_inspect_lists_all_tensors_when_asked(tmp_path: Path) -> None:
    headway.save(tmp_path, torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(20))))
    assert inspect(tmp_path).endswith("... 16 more (--all)")
    assert inspect(tmp_path, whole=True).count("float32 [1]") == 20


def test_export_is_the_models_state(tmp_path: Path) -> None:
    model = saved(tmp_path / "out")
    result = CliRunner().invoke(
        command, ["checkpoint", "export", str(tmp_path / "out"), str(tmp_path / "w.safetensors")]
    )
    assert result.exit_code == 0 and "w.safetensors: 23 tensors" in result.output
    again = build(seed=2)
    again.load_state_dict(load_file(tmp_path / "w.safetensors"))
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_export_refuses(tmp_path: Path) -> None:
    saved(tmp_path / "out")
    with pytest.raises(CheckpointError, match="name it w.safetensors"):
        export(tmp_path / "out", tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        export(tmp_path / "none", tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="No such file|directory"):
        export(tmp_path / "out", tmp_path / "none" / "w.safetensors")
