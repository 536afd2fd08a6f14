"""Keras 3 on its torch backend: layers have names, stages hold their part, and train as the whole does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from headway.graph.record import record
from headway.graph.weights import state_of
from headway.layout.split import split
from headway.run.hold import drop_others
from headway.run.verify import verify_split
from tests.examples.test_examples import load
from tests.run.staged import difference, train_staged, train_whole


@pytest.fixture(scope="module")
def example(root: Path) -> ModuleType:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is an extra: pip install 'headway[keras]'")
    return load(root / "examples" / "keras_digits.py")  # which chooses the torch backend before it imports Keras


def build(example: ModuleType) -> nn.Module:
    example.keras.utils.clear_session()  # names of layers count from one again, as in another process
    example.keras.utils.set_random_seed(0)
    return example.build_model(4, 3)


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 8, 8, 1), torch.randint(10, (6,))


def test_layers_are_seen_under_their_names(example: ModuleType) -> None:
    graph = record(build(example), example.loss, batch_of())
    names = {module.path for module in graph.modules}
    assert {"conv2d", "batch_normalization", "add", "dense"} <= {name.rpartition(".")[2] for name in names}
    assert not [name for name in names if name.startswith("<")]
    assert len({name for call in graph.calls for name in call.written_buffers}) == 6  # mean and variance of each norm


def test_stages_train_as_the_whole(example: ModuleType) -> None:
    model = build(example)
    graph = record(model, example.loss, batch_of())
    want = train_whole(model, example.loss, batch_of(), graph, clone=lambda _: build(example))
    names = [cut.name for cut in graph.cuts]
    for cuts in ([names[len(names) // 2]], [names[len(names) // 4], names[len(names) // 2], names[-3]]):
        parts = split(graph, cuts)
        got = train_staged(model, example.loss, batch_of(), 6, parts, clone=lambda _: build(example))
        assert len(got.gradients) == len(want.gradients) and difference(want, got) < 1e-5


def test_a_stage_lets_go_of_the_rest_where_layers_find_it(example: ModuleType) -> None:
    model = build(example)
    graph = record(model, example.loss, batch_of())
    part = split(graph, [graph.cuts[len(graph.cuts) // 2].name]).stages[0]
    kept = drop_others(model, part.parameters)
    assert 0 < len(kept) < len(list(model.parameters()))
    assert sum(not v._value.is_meta for v in model.variables) == len(kept)


def test_planning_and_verifying_leave_moving_averages_alone(example: ModuleType) -> None:
    model = build(example)
    before = {name: tensor.clone() for name, tensor in state_of(model).items()}
    assert len(before) >= 6
    graph = record(model, example.loss, batch_of())
    parts = split(graph, [graph.cuts[len(graph.cuts) // 2].name])
    assert verify_split(model, example.loss, batch_of(), parts, lambda samples: graph).passed
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(model).items())
