"""What a run says of its steps: which step of how many, and the numbers of the training, not of what was evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway import journal
from headway.collective.world import World
from headway.run.parallel import ParallelModel

BATCHES = [(torch.full((4, 3), 2.0), torch.ones(4))] * 3


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (model(batch[0])[:, 0] * batch[1]).mean(), {"largest": batch[1].max()}


def parallel(folder: Path) -> ParallelModel:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return ParallelModel(model, loss, headway.plan(model, loss, BATCHES[0]), World(), folder)


def steps(folder: Path) -> list[journal.StepDone]:
    events = [entry.event for entry in journal.read(folder)]
    return [event for event in events if isinstance(event, journal.StepDone)]


def test_passes_that_follow_each_other_count_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = parallel(tmp_path)
    step = 10  # of a run that was resumed
    for _ in range(2):
        for batch in model.batches(BATCHES):
            model.log(step, loss=model.forward_backward(batch))
            step += 1
    shown = [text.split()[1] for text in capsys.readouterr().out.splitlines() if text.startswith("step")]
    assert shown == ["11/13", "13/13", "16/16"]


def test_numbers_from_zero_in_each_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = parallel(tmp_path)
    for _ in range(2):
        for step, batch in enumerate(model.batches(BATCHES)):
            model.log(step, loss=model.forward_backward(batch))
    shown = [text.split()[1] for text in capsys.readouterr().out.splitlines() if text.startswith("step")]
    assert shown == ["1/3", "3/3", "3/3"]


def test_a_stream_has_no_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield from zip(torch.ones(8, 3), torch.ones(8), strict=True)

    model = parallel(tmp_path)
    for step, batch in enumerate(model.batches(torch.utils.data.DataLoader(Stream(), 4))):
        model.log(step, loss=model.forward_backward(batch))
    assert [done.step for done in steps(tmp_path)] == [0, 1]
    assert "step 0  loss" in capsys.readouterr().out


def test_what_is_evaluated_between_is_not_the_training(tmp_path: Path) -> None:
    model = parallel(tmp_path)
    model.forward_backward(BATCHES[0])
    model.evaluate((torch.ones(2, 3), torch.full((2,), 7.0)))
    assert model.metrics == {"largest": 7.0}, "what was done last"
    model.log(0)
    (done,) = steps(tmp_path)
    assert (done.samples, done.metrics) == (4, {"largest": 1.0})


def test_a_script_that_only_evaluates_logs_that(tmp_path: Path) -> None:
    model = parallel(tmp_path)
    model.log(0, loss=model.evaluate((torch.ones(2, 3), torch.full((2,), 7.0))))
    (done,) = steps(tmp_path)
    assert (done.samples, done.metrics) == (2, {"largest": 7.0})
