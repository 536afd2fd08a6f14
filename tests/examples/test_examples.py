"""The examples: their models, data and losses by themselves, and each script as a person would start it."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


def load(path: Path) -> ModuleType:
    """Import a script without running it."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpt(root: Path) -> ModuleType:
    return load(root / "examples" / "gpt.py")


@pytest.fixture(scope="module")
def digits(root: Path) -> ModuleType:
    return load(root / "examples" / "digits.py")


def small(gpt: ModuleType, *more: str) -> object:
    return gpt.parse_options("--layers 2 --width 32 --heads 2 --context 16 --batch 4 --steps 6".split() + list(more))


def test_gpt_by_default_has_five_to_ten_million_parameters(gpt: ModuleType) -> None:
    with torch.device("meta"):
        model = gpt.build_model(gpt.parse_options([]))
    assert 5e6 < sum(p.numel() for p in model.parameters()) < 10e6


def test_gpt_output_layer_is_the_token_embedding(gpt: ModuleType) -> None:
    model = gpt.build_model(small(gpt))
    assert not [name for name, _ in model.named_parameters() if "head" in name]
    with torch.no_grad():
        model.token.weight[200] = 0  # a byte that the input does not hold: only the output can show it
    assert model(torch.zeros(1, 4, dtype=torch.int64))[..., 200].eq(0).all()


def test_gpt_starts_at_the_loss_of_a_uniform_guess(gpt: ModuleType) -> None:
    options = small(gpt)
    loader, _ = gpt.build_loaders(options)
    value = gpt.loss(gpt.build_model(options), next(iter(loader)))
    assert value.item() == pytest.approx(math.log(256), abs=0.1)


def test_gpt_does_not_look_ahead(gpt: ModuleType) -> None:
    model = gpt.build_model(small(gpt, "--dtype", "float64"))
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = 7
    assert torch.equal(model(tokens)[0, :9], model(changed)[0, :9])


def test_gpt_text_is_the_same_on_every_reading_and_held_out_files_are_not_trained_on(gpt: ModuleType) -> None:
    train, held_out = gpt.read_text()
    assert len(train) == 8_000_000 and len(held_out) > 100_000
    assert all(torch.equal(one, two) for one, two in zip((train, held_out), gpt.read_text(), strict=True))
    piece = bytes(held_out[1000:1400].tolist())
    assert piece not in bytes(train.tolist())


def test_gpt_targets_are_the_next_bytes_and_each_step_has_a_whole_global_batch(gpt: ModuleType) -> None:
    loader, held_out = gpt.build_loaders(small(gpt))
    batches = list(loader)
    assert len(batches) == 6
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (4, 16)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    again, _ = gpt.build_loaders(small(gpt))
    assert all(torch.equal(one[0], two[0]) for one, two in zip(batches, again, strict=True))
    assert len(held_out) == 16


def test_gpt_sampling_continues_the_prompt(gpt: ModuleType) -> None:
    model = gpt.build_model(small(gpt))
    model.predict = model
    texts = gpt.sample(model, ["def ", "class "], 20, 16, seed=1)
    assert texts[0].startswith("def ") and texts[1].startswith("class ")
    assert all(len(text) > 8 for text in texts)
    assert texts == gpt.sample(model, ["def ", "class "], 20, 16, seed=1)


def test_learning_rate_rises_and_falls(gpt: ModuleType) -> None:
    rates = [gpt.learning_rate(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(1.0) and rates[0] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_digits_are_split_once_and_batches_are_global(digits: ModuleType) -> None:
    train, held_out = digits.read_digits()
    assert len(train) + len(held_out) == 1797 and len(held_out) == 360
    images, labels = next(iter(digits.build_loader(train, digits.parse_options(["--batch", "12"]))))
    assert images.shape == (12, 1, 8, 8) and labels.shape == (12,)
    assert images.min() >= -1 and images.max() <= 1


def test_digits_network_learns_in_plain_torch(digits: ModuleType) -> None:
    """The model, data and loss are an ordinary script's: torch alone trains them."""
    options = digits.parse_options("--width 8 --depth 1 --epochs 2".split())
    model = digits.build_model(options)
    train, held_out = digits.read_digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(options.epochs):
        for batch in digits.build_loader(train, options):
            optimizer.zero_grad()
            digits.loss(model, batch).backward()
            optimizer.step()
    model.eval()
    images, labels = held_out.tensors
    assert (model(images).argmax(1) == labels).float().mean() > 0.8


GPT = "--layers 2 --width 32 --heads 2 --context 32 --batch 8 --steps 6 --sample 8".split()
DIGITS = "--width 8 --depth 1 --epochs 2".split()
STARTS = {
    "python": [sys.executable],
    "headway": [sys.executable, "-m", "headway", "run", "-n", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run_example(root: Path, folder: Path, start: list[str], script: str, options: list[str]) -> str:
    """Run an example in `folder` and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    command = [*start, str(root / "examples" / script), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.several
@pytest.mark.parametrize("start", STARTS)
def test_gpt_runs_however_it_is_started(root: Path, tmp_path: Path, start: str) -> None:
    printed = run_example(root, tmp_path, STARTS[start], "gpt.py", GPT)
    assert printed.count("bits per held-out byte") == 1


@pytest.mark.several
def test_gpt_says_the_same_under_one_process_and_two(root: Path, tmp_path: Path) -> None:
    options = [*GPT, "--dtype", "float64"]
    closing = [
        next(
            line
            for line in run_example(root, tmp_path, STARTS[start], "gpt.py", options).splitlines()
            if "bits" in line
        )
        for start in ("python", "headway")
    ]
    assert closing[0] == closing[1]


@pytest.mark.several
@pytest.mark.parametrize("start", STARTS)
def test_digits_runs_however_it_is_started(root: Path, tmp_path: Path, start: str) -> None:
    printed = run_example(root, tmp_path, STARTS[start], "digits.py", DIGITS)
    assert printed.count("held-out digits read right") == 1
