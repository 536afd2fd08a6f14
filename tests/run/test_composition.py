"""Composition: what people put around or into their modules, and what a stage makes of it when it is cut anywhere."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize, prune

from headway.errors import SplitError
from headway.graph.record import record
from headway.layout.split import split
from headway.run.stage import Stage
from tests.graph.programs import square
from tests.run.quantised import quantise
from tests.run.staged import difference, train_staged, train_whole

Case = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]


def rows() -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3)).double()


def changed(change: Callable[[nn.Linear], Any]) -> Case:
    """Change the first layer of each block."""
    model = blocks()
    for block in model[:4]:
        change(block[0])
    return model, square, rows()


def lora() -> Case:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=32
    )
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=targets, init_lora_weights=False, use_dora=True)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    return model.double(), lambda model, batch: model(input_ids=batch, labels=batch).loss, torch.randint(32, (3, 6))


def compiled_modules() -> Case:
    model = blocks()
    model[0], model[2] = (torch.compile(block, backend="eager") for block in (model[0], model[2]))
    model[1].compile(backend="eager")
    return model, square, rows()


def compiled_function() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.squash = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.squash(layer(x))
            return x

    return Model().double(), square, rows()


def hooks_that_change() -> Case:
    """What comes in, what goes out and both gradients are changed, each of them once."""
    model = blocks()
    for block in model.children():
        block.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        block.register_forward_hook(lambda module, args, kwargs, result: result * 0.5 + 1, with_kwargs=True)
        block.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
        block.register_full_backward_hook(lambda module, to, of: (None if to[0] is None else to[0] * 3,))
    return model, square, rows()


def hooks_on_tensors() -> Case:
    """A hook on a tensor runs on the stage that makes it, not again where it is received."""

    def hook(module: nn.Module, args: Any, result: torch.Tensor) -> None:
        result.register_hook(lambda gradient: gradient * 0.5)
        result.retain_grad()

    model = blocks()
    for block in model[:4]:
        block.register_forward_hook(hook)
        block[0].register_forward_hook(hook)
    return model, square, rows()


class Symmetric(nn.Module):
    """Makes a weight symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


def cached() -> Case:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return (model[:4](model[:4](batch)) ** 2).mean()

    return changed(lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()))[0], loss, rows()


def functional() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = blocks(), nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block, scale in zip(self.layers[:4], self.scale, strict=True):
                x = functional_call(block, {"0.weight": block[0].weight * scale}, (x,))
            return self.layers[4](x)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
        return (functional_call(model, doubled, (batch,)) ** 2).mean()

    return Model(), loss, rows()


def shared() -> Case:
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return nn.Sequential(block, deepcopy(block), block, deepcopy(block), block).double(), square, rows()


class Doubled(nn.Linear):
    """A user's own kind of linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight * 2, self.bias)


def own_linear() -> Case:
    return nn.Sequential(*(Doubled(6, 6) for _ in range(4))).double(), square, rows()


def quantised() -> Case:
    """Frozen weights of a tensor subclass, as torchao's weight-only kinds are, under trained biases."""
    return changed(quantise)


CASES: tuple[Callable[[], Case], ...] = (
    lora, compiled_modules, compiled_function, hooks_that_change, hooks_on_tensors, cached, functional, shared,
    own_linear, quantised,
)  # fmt: skip
CHANGES: tuple[Callable[[nn.Linear], Any], ...] = (
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
    lambda layer: prune.random_structured(layer, "weight", 2, dim=0),
)


def check_case(case: Callable[[], Case], tolerance: float = 1e-12) -> None:
    """Compare stages with the undivided model: cut in 2 at up to ten places, and in 4 at random ones."""

    def again(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)  # not deepcopy: pruned and compiled modules cannot be copied
        return case()[0]

    torch.manual_seed(0)
    model, loss, batch = case()
    graph = record(model, loss, batch)
    names = [cut.name for cut in graph.cuts]
    chosen = [[name] for name in names[:: max(1, len(names) // 10)]]
    draw = random.Random(0)
    chosen += [[names[i] for i in sorted(draw.sample(range(len(names)), 3))] for _ in range(2)]
    want = train_whole(model, loss, batch, graph, clone=again)
    assert len(want.gradients) > 3
    for cuts in chosen:
        parts = split(graph, cuts)
        steps = 1 if parts.state else 2  # the second time, what was learned of absent tensors is used
        got = train_staged(model, loss, batch, graph.samples, parts, steps, clone=again)
        assert difference(want, got) < tolerance, cuts


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("case", CASES)
def test_composes(case: Callable[[], Case]) -> None:
    check_case(case)


@pytest.mark.parametrize("change", CHANGES)
def test_parametrized_and_pruned_layers(change: Callable[[nn.Linear], Any]) -> None:
    check_case(lambda: changed(change))


def test_compiled_block_runs_compiled_where_a_stage_holds_all_of_it() -> None:
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(str(graph.graph.find_nodes(op="call_function", target=torch.tanh)))
            return graph.forward(*args)

        return run

    torch.compiler.reset()
    model = blocks()
    model[0], model[2] = torch.compile(model[0], backend=backend), torch.compile(model[2], backend=backend)
    graph, batch = record(model, square, rows()), rows()
    parts = split(graph, ["2._orig_mod.1"])
    for index, count in ((0, 1), (1, 0)):  # the second block is cut, so neither stage runs it compiled
        ran.clear()
        stage = Stage.of(parts, index, model, square, torch.device("cpu"))
        received = {crossing.key: rows().requires_grad_() for crossing in parts.stages[index].receives}
        stage.run(batch, received, {})
        assert len(ran) == count
    assert model[0](batch).shape == (4, 6) and len(ran) == 1  # and outside a stage everything compiles again


def test_torchao_weight_only() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def case() -> Case:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        config = quantization.Int8WeightOnlyConfig()
        quantization.quantize_(model, config, filter_fn=lambda _, name: name in ("0", "1", "2"))
        return model, square, torch.randn(4, 32)

    check_case(case, 1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_logging_hooks_tell_each_module_once() -> None:
    """In 4 stages, hooks hear of the gradients of each module once, and of the results that a stage computes."""
    events: list[tuple[str, str, bool]] = []

    def case() -> Case:
        model = blocks()
        for name, module in model.named_modules():

            def forward(module: nn.Module, args: Any, result: torch.Tensor, name: str = name) -> None:
                events.append(("forward", name, result.is_meta))

            def backward(module: nn.Module, to: Any, of: Any, name: str = name) -> None:
                events.append(("backward", name, of[0].is_meta))

            module.register_forward_hook(forward)
            module.register_full_backward_hook(backward)
        return model, square, rows()

    model, loss, batch = case()
    graph = record(model, loss, batch)
    parts = split(graph, ["1", "2", "4"])
    events.clear()
    train_whole(model, loss, batch, graph, clone=lambda _: case()[0])
    want = Counter(events)
    events.clear()
    train_staged(model, loss, batch, graph.samples, parts, clone=lambda _: case()[0])
    got = Counter(events)
    assert {event: n for event, n in got.items() if event[0] == "backward"} == {
        event: n for event, n in want.items() if event[0] == "backward"
    }
    assert all(got[event] >= 1 for event in want)


def test_module_with_a_backward_hook_stays_whole() -> None:
    """Its hook takes gradients of inputs and results: no cut is offered inside, and one made before is refused."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))).double()
    before = record(model, square, rows())
    inside = [cut.name for cut in before.cuts if cut.position > (1, 0, 2, 0) and cut.position[:4] == (1, 0, 2, 0)]
    model[1].register_full_backward_hook(lambda module, to, of: None)
    after = record(model, square, rows())
    assert inside and not {cut.position[:4] for cut in after.cuts if len(cut.position) > 4} & {(1, 0, 2, 0)}
    assert any("full backward hook" in reason for _, reason in after.refused_cuts)
    parts = split(before, inside[-1:])
    stage = Stage.of(parts, 1, model, square, torch.device("cpu"))
    received = {crossing.key: rows().requires_grad_() for crossing in parts.stages[1].receives}
    with pytest.raises(SplitError, match="full backward hook"):
        stage.run(rows(), received, {})
