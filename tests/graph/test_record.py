"""record: what is noted of each call, held to what is known of the program, and that nothing is left behind."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import SplitError
from headway.graph.model import ModelGraph, Ref, Weight
from headway.graph.record import record, record_run
from tests.graph.programs import GPT, next_token, square, tokens


def names(graph: ModelGraph) -> list[str]:
    return [call.function.rsplit(".", 1)[-1] for call in graph.calls]


def test_positions_follow_the_module_calls() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    graph = record(model, square, torch.randn(3, 4))
    assert [(c.position, c.module) for c in graph.calls] == [
        ((1, 0, 1, 0, 0, 1), "0"),
        ((1, 0, 2, 0, 1, 0, 0, 1), "1.0"),
        ((1, 0, 2, 0, 2, 0, 0, 1), "1.1"),
        ((1, 1), ""),  # square, after the first module call of the loss function
        ((1, 2), ""),
    ]
    assert [(m.position, m.path) for m in graph.modules] == [
        ((1, 0), ""),
        ((1, 0, 1, 0), "0"),
        ((1, 0, 2, 0), "1"),
        ((1, 0, 2, 0, 1, 0), "1.0"),
        ((1, 0, 2, 0, 2, 0), "1.1"),
    ]


def test_call_knows_its_inputs_weights_and_line() -> None:
    model = nn.Linear(4, 2)
    graph = record(model, square, torch.randn(3, 4))
    linear, power, mean = graph.calls
    assert linear.parameters == ("weight", "bias") and linear.inputs == (0,)
    args, kwargs = linear.arguments
    assert args == (Ref(0), Weight("weight"), Weight("bias")) and kwargs == {}
    assert power.inputs == linear.outputs and mean.inputs == power.outputs
    assert power.where.startswith("tests/graph/programs.py:")
    assert graph.values[linear.outputs[0]].shape == (3, 2) and graph.values[linear.outputs[0]].requires_grad
    assert not graph.values[0].derived and graph.values[linear.outputs[0]].derived


def test_flops_by_the_closed_form() -> None:
    layers, d, t, b, words = 3, 16, 8, 2, 30
    graph = record(GPT(layers, d, 2, words), next_token, tokens(b, t + 1, words))
    dense = 2 * b * t * (layers * (3 * d * d + d * d + 8 * d * d) + d * words)
    attention = layers * 4 * b * t * t * d
    assert graph.flops == dense + attention


@pytest.mark.parametrize("meta", [True, False])
def test_in_place_call_writes_its_argument(meta: bool) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y = model(batch)
        if not meta:
            y.sum().item()  # makes the recorder compute
        z = torch.zeros(3, 2)
        z[:, 0] = y[:, 0]
        y.add_(1.0)
        torch.exp(y, out=z) if False else z.mul_(2.0)
        return (y * z).mean()

    graph = record(nn.Linear(4, 2), loss, torch.randn(3, 4))
    assert graph.on_meta is meta
    zeros = next(c for c in graph.calls if c.function == "torch.zeros")
    item = next(c for c in graph.calls if c.function.endswith("__setitem__"))
    add = next(c for c in graph.calls if c.function.endswith("add_"))
    assert item.writes == zeros.outputs and item.outputs == ()
    assert add.writes == graph.calls[0].outputs and add.outputs == ()
    assert next(c for c in graph.calls if c.function.endswith("mul_")).derived  # z holds what the model made


def test_views_share_a_storage_and_tuples_count_their_outputs() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        a, b = model(batch).chunk(2, dim=-1)
        value, index = a.max(dim=-1)
        return (value + b.sum() + index).mean()

    graph = record(nn.Linear(4, 6), loss, torch.randn(3, 4))
    chunk, top = graph.calls[1], graph.calls[2]
    assert [graph.values[v].output for v in chunk.outputs] == [0, 1]
    assert {graph.values[v].storage for v in chunk.outputs} == {graph.values[graph.calls[0].outputs[0]].storage}
    assert chunk.output_bytes == 0
    assert [graph.values[v].dtype for v in top.outputs] == ["float32", "int64"]


def test_argument_given_back_is_no_new_value() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ model.weight.float().t()).float().mean()

    graph = record(nn.Linear(4, 6), loss, torch.randn(3, 4))
    transpose = next(c for c in graph.calls if c.function.endswith(".t"))
    assert transpose.parameters == ("weight",)


def test_tied_weight_is_one_parameter() -> None:
    graph = record(GPT(), next_token, tokens())
    info = graph.parameter["head.weight"]
    assert info is graph.parameter["token.weight"] and info.aliases == ("head.weight",)
    assert {c.module for c in graph.calls if "token.weight" in c.parameters} == {"token", "head"}
    assert graph.num_parameters == sum(p.numel() for p in GPT().parameters())


def test_saved_storages_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x @ self.w  # saves x and w
            return h.sin() + h.cos()  # both save h

    graph = record(Twice(), square, torch.randn(3, 4))
    kept = [graph.storages[s] for call in graph.calls for s in call.saved]
    # x, h, and the sum that is squared; the parameter is not counted, h once
    assert kept == [48, 48, 48]
    assert [len(c.saved) for c in graph.calls[:4]] == [1, 1, 0, 0]


def reads(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    y = model(batch).mean()
    return y if y > 0 else -y


def test_model_on_meta_is_recorded_without_computing() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    graph = record(model, square, torch.randn(3, 4))
    assert graph.on_meta and graph.calls[0].parameters == ("weight", "bias") and not graph.notes


def test_a_read_of_a_model_on_meta_is_taken_as_with_random_weights_and_noted() -> None:
    with torch.device("meta"):
        ghost = nn.Linear(4, 2)
    state = torch.get_rng_state()
    graph = record(ghost, reads, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state) and ghost.weight.is_meta
    assert not graph.on_meta and [c.function for c in graph.calls if c.reads_value] == ["torch.Tensor.__bool__"]
    line = reads.__code__.co_firstlineno + 2
    assert len(graph.notes) == 1 and f"test_record.py:{line}: bool reads a value" in graph.notes[0]
    real = record(nn.Linear(4, 2), reads, torch.randn(3, 4))
    assert [c.position for c in graph.calls][:3] == [c.position for c in real.calls][:3] and not real.notes


def test_a_read_of_a_model_that_is_too_large_for_random_weights_is_refused_with_its_line() -> None:
    with torch.device("meta"):
        huge = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
    line = reads.__code__.co_firstlineno + 2
    with pytest.raises(
        SplitError, match=f"__bool__ reads the content(.|\n)*test_record.py:{line}(.|\n)*give the model"
    ):
        record(huge, reads, torch.zeros(1, 1 << 20))


@pytest.mark.parametrize("read", [True, False])
def test_nothing_is_left_behind(read: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("peak", torch.zeros(()))
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(self.norm(x), 0.5) * random.random() * numpy.random.rand()
            self.last = x
            self.peak = torch.maximum(self.peak, x.detach().amax())
            if read:
                x = x + x.sum().item()
            return x

    model, before = Model(), {}
    before = {n: b.clone() for n, b in model.named_buffers()}
    states = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy())
    graph = record(model, square, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert not (isinstance(model.last, torch.Tensor) and model.last.is_meta)
    assert all(p.grad is None for p in model.parameters())
    line = Model.forward.__code__.co_firstlineno + 1
    assert graph.host_draws == (f"tests/graph/test_record.py:{line}",) and graph.random
    written = {n for c in graph.calls for n in c.written_buffers}
    assert written == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "peak"}


def test_what_is_read_from_changing_state_depends_on_it() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.mean * 2  # of parameters, since they are in the mean
            y = self.linear(x)
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
            return y - shift

    graph = record(Ema(), square, torch.randn(3, 4))
    shift = graph.calls[0]
    assert shift.function.endswith("mul") and shift.derived
    assert not [c for c in graph.cuts if c.index in (1, 2, 3)]  # the mean stays on one stage


def test_custom_function_is_one_call_with_the_weights_that_it_finds() -> None:
    layer = nn.Linear(4, 4)

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return layer(x) * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(4, 4), layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Through.apply(self.first(x))

    graph = record(Model(), square, torch.randn(3, 4))
    assert len(graph.calls) == 4
    assert graph.calls[1].parameters == ("layer.weight", "layer.bias")


@pytest.mark.parametrize("reentrant", [True, False])
def test_no_cut_inside_a_checkpointed_region(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.a, self.b(x), use_reentrant=reentrant))

    graph = record(Model(), square, torch.randn(3, 4))
    assert [c.name for c in graph.cuts] == ["a", "b*1", "loss#1.1", "loss#1.2"]
    assert len([why for _, why in graph.refused_cuts if "checkpointed" in why]) == 2


def test_transforms_of_torch_func_are_one_call() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: (row * self.w).sin() + row)(self.a(x))

    graph = record(Model(), square, torch.randn(3, 4))
    assert len(graph.calls) == 4 and graph.calls[1].parameters == ("w",)


def test_gradient_inside_the_forward_keeps_its_calls_together() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model[0](batch)
        energy = model[1](x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().sum()

    graph = record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), loss, torch.randn(3, 4))
    assert [c.name for c in graph.cuts] == ["1", "loss#2.4", "loss#2.5"]


def test_scripted_module_is_one_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2))
    graph = record(model, square, torch.randn(3, 4))
    assert names(graph)[0] == "linear" and len(graph.calls) == 5
    assert set(graph.calls[1].parameters) == {"1.0.weight", "1.0.bias"}


def test_result_is_what_the_loss_function_gives() -> None:
    run = record_run(nn.Linear(4, 2), lambda m, b: {"loss": m(b).mean(), "rows": len(b)}, torch.randn(3, 4))
    assert run.result["rows"] == 3 and run.result["loss"].shape == () and run.graph.samples == 3


def test_large_gpt_on_meta_in_seconds() -> None:
    with torch.device("meta"):
        model = GPT(96, 512, 8, 256)
    start = time.process_time()
    graph = record(model, next_token, torch.zeros(4, 65, dtype=torch.int64))
    assert time.process_time() - start < 10  # about 1.5 on an idle core; torch.export takes 17.8
    assert len(graph.cuts) > 1000 and graph.num_parameters == sum(p.numel() for p in model.parameters())


def test_what_is_written_with_a_gradient_needs_one_through_every_view() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(3, 2)
        view = out[:, 0]  # made before anything is written
        view.copy_(model(batch)[:, 0])
        doubled = out * 2
        out[:, 1] = 1.0
        return (doubled + out).mean()

    graph = record(nn.Linear(4, 2), loss, torch.randn(3, 4))
    assert graph.on_meta
    doubled = next(c for c in graph.calls if c.function.endswith("mul"))
    assert graph.values[doubled.outputs[0]].requires_grad


def test_values_that_a_function_closes_over_are_its_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return torch.vmap(lambda row: h @ row)(self.w)

    graph = record(Model(), square, torch.randn(3, 4))
    assert graph.calls[1].inputs == graph.calls[0].outputs


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_count_alike_on_meta_and_on_real_numbers(cell: type[nn.Module]) -> None:
    """Each matrix meets each of the 3 x 4 rows once, in both directions of two layers."""
    model = cell(5, 7, num_layers=2, bidirectional=True)

    def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)[0].mean()

    def reading(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)[0].mean() * (1 if plain(model, batch) > 1e9 else 2)

    want = sum(2 * 12 * p.numel() for p in model.parameters() if p.dim() == 2)
    assert record(model, plain, torch.randn(3, 4, 5)).flops == want
    assert record(model, reading, torch.randn(3, 4, 5)).flops == 2 * want


def test_what_a_loss_returns_inside_a_dataclass_crosses_the_cuts_behind_it() -> None:
    @dataclass(frozen=True)
    class Sum:
        total: torch.Tensor
        count: float

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        out = model(batch)
        large = Sum(out.detach().abs().sum(), float(out.numel()))
        return out.square().mean(), {"large": large}

    graph = record(nn.Linear(4, 4), loss, torch.randn(3, 4))
    made = next(call for call in graph.calls if call.function.endswith("sum")).outputs
    assert set(made) <= set(graph.cuts[-1].boundary)
