"""walk: names and kinds of torch functions, and that following a program changes nothing of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from headway.graph.chance import is_random
from headway.graph.frame import number_modules
from headway.graph.walk import (
    Walk,
    function_name,
    is_read,
    is_shape_read,
    map_tensors,
    module_paths,
    tensors_of,
)
from tests.graph.programs import GPT, next_token, tokens


class Log(Walk):
    """Notes events and computes them."""

    def __init__(self, model: nn.Module, landmarks: Any = None) -> None:
        super().__init__(module_paths(model), landmarks)
        self.seen: list[Any] = []

    def on_call(self, position: Any, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self.seen.append((position, function_name(func)))
        return result

    def on_module(self, position: Any, module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append((position, self.paths[id(module)]))
        return run()


def test_walk_changes_no_result_and_leaves_torch_as_it_was() -> None:
    model, batch = GPT(), tokens()
    gc.collect()  # stages of other tests
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    with Log(model):
        assert nn.Module.__call__ is not call
        seen = next_token(model, batch)
    assert torch.equal(seen, next_token(model, batch))
    assert nn.Module.__call__ is call and torch.autograd.Function.__dict__["apply"] is apply


def test_positions_are_in_program_order() -> None:
    model = GPT()
    with Log(model) as log:
        next_token(model, tokens())
    positions = [p for p, name in log.seen if name != "torch.Tensor.shape"]
    assert positions == sorted(positions)


def test_landmarks_bring_a_changed_program_back_into_step() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor, extra: int, with_b: bool) -> torch.Tensor:
            for _ in range(extra):
                x = x + 1
            x = self.a(x)
            if with_b:
                x = self.b(x)
            return self.c(x) + 1

    model = Model()
    landmarks = {(): number_modules([""]), (1, 0): number_modules(["a", "b", "c"])}

    def places(extra: int, with_b: bool) -> dict[str, Any]:
        with Log(model, landmarks) as log:
            model(torch.ones(1), extra, with_b)
        return {name: position for position, name in log.seen}

    usual, other = places(0, True), places(5, False)
    assert usual["a"] == other["a"] == (1, 0, 1, 0) and usual["c"] == other["c"] == (1, 0, 3, 0)
    # an unknown module call, here one more of a known path, is an event after the last landmark
    with Log(model, {(): number_modules([""]), (1, 0): number_modules(["a"])}) as log:
        model(torch.ones(1), 0, True)
    assert dict((n, p) for p, n in log.seen)["b"] == (1, 0, 1, 1)


def test_pause_hides_calls() -> None:
    model = nn.Linear(2, 2)
    with Log(model) as log:
        with log.pause():
            model(torch.ones(1, 2))
        torch.ones(1).sin()
    assert [name for _, name in log.seen] == ["torch.ones", "torch.Tensor.sin"]


MASK = torch.tensor([True, False])
X = torch.ones(2)
KINDS: list[tuple[Any, tuple[Any, ...], dict[str, Any], bool, bool]] = [
    (torch.Tensor.item, (X[0],), {}, True, False),
    (torch.Tensor.__bool__, (X[0],), {}, True, False),
    (torch.Tensor.tolist, (X,), {}, True, False),
    (torch.nonzero, (X,), {}, False, True),
    (torch.where, (MASK,), {}, False, True),
    (torch.where, (MASK, X, X), {}, False, False),
    (torch.Tensor.__getitem__, (X, MASK), {}, False, True),
    (torch.Tensor.__getitem__, (X, torch.tensor([1])), {}, False, False),
    (torch.repeat_interleave, (X, torch.tensor([1, 2])), {}, False, True),
    (torch.repeat_interleave, (X, 2), {}, False, False),
    (torch.add, (X, X), {}, False, False),
]


@pytest.mark.parametrize(("func", "args", "kwargs", "read", "shape"), KINDS)
def test_reads(func: Any, args: Any, kwargs: Any, read: bool, shape: bool) -> None:
    assert (is_read(func, args, kwargs), is_shape_read(func, args, kwargs)) == (read, shape)


DRAWS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (F.dropout, (X,), {"p": 0.5, "training": True}),
    (F.dropout, (X,), {"p": 0.5, "training": False}),
    (F.dropout, (X, 0.0), {}),
    (torch.rand, (2,), {}),
    (torch.randn_like, (X,), {}),
    (torch.Tensor.uniform_, (X.clone(),), {}),
    (torch.randperm, (20,), {}),
    (torch.bernoulli, (X / 2,), {}),
    (F.rrelu, (-X,), {"training": True}),
    (F.scaled_dot_product_attention, (X.view(1, 1, 2, 1),) * 3, {"dropout_p": 0.5}),
    (F.scaled_dot_product_attention, (X.view(1, 1, 2, 1),) * 3, {}),
    (torch.sin, (X,), {}),
    (torch.zeros, (2,), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), DRAWS)
def test_what_is_random_is_what_moves_the_generator(func: Any, args: Any, kwargs: Any) -> None:
    before = torch.get_rng_state()
    func(*args, **kwargs)
    assert is_random(func, args, kwargs) == (not torch.equal(before, torch.get_rng_state()))


def test_nested_tensors_are_found_and_changed() -> None:
    nested = (X, [MASK, {"a": X, "b": 1}], slice(X, None), torch.max(X, dim=0))
    assert len(tensors_of(nested, [])) == 6
    changed = map_tensors(nested, lambda t: t.shape)
    assert changed[1] == [MASK.shape, {"a": X.shape, "b": 1}] and changed[2].start == X.shape
