"""absent: shapes on meta, held to what computing gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from headway.graph.absent import answer_fact, call_on_meta, meta_twin
from headway.graph.walk import tensors_of

X = torch.randn(3, 4)
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.matmul, (X, X.t()), {}),
    (torch.Tensor.__getitem__, (X, (slice(1, None), torch.tensor(2))), {}),
    (torch.Tensor.__getitem__, (X, slice(torch.tensor(1), torch.tensor(3))), {}),
    (torch.Tensor.view, (X, torch.tensor(2), -1), {}),
    (torch.Tensor.to, (X, "cpu"), {}),
    (torch.Tensor.to, (X, torch.device("cpu"), torch.float64), {}),
    (torch.Tensor.cpu, (X,), {}),
    (torch.zeros, (2, 3), {"device": "cpu"}),
    (torch.max, (X,), {"dim": 1}),
    (torch.Tensor.chunk, (X, 2), {"dim": 1}),
    (torch.cat, ([X, X],), {}),
    (F.conv1d, (X[None], torch.randn(5, 3, 2)), {}),
    (torch.einsum, ("ij,kj->ik", X, X), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS)
def test_shapes_without_values(func: Any, args: Any, kwargs: Any) -> None:
    want, got = tensors_of(func(*args, **kwargs), []), tensors_of(call_on_meta(func, args, kwargs, meta_twin), [])
    assert [(t.shape, t.dtype, t.stride()) for t in want] == [(t.shape, t.dtype, t.stride()) for t in got]
    assert all(t.is_meta for t in got)


def test_hidden_number_is_not_looked_into() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        call_on_meta(torch.Tensor.view, (X, torch.tensor(2), -1), {}, meta_twin, lambda t: True)


def test_autocast_lowers_what_it_would() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for func, args in ((F.linear, (X, X)), (torch.add, (X, X)), (torch.matmul, (X, X.t()))):
            assert call_on_meta(func, args, {}, meta_twin).dtype == func(*args).dtype


def test_grouped_product_has_a_shape_in_any_precision() -> None:
    a, b = torch.randn(6, 16, device="meta"), torch.randn(2, 16, 8, device="meta")
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    result = call_on_meta(torch._grouped_mm, (a, b), {"offs": offsets}, meta_twin)
    assert result.shape == (6, 8) and result.dtype is torch.float32


def test_twin_looks_the_same() -> None:
    odd = torch.randn(4, 6)[:, ::2].t().requires_grad_()
    twin = meta_twin(odd)
    assert (twin.shape, twin.stride(), twin.dtype, twin.requires_grad) == (odd.shape, odd.stride(), odd.dtype, True)


def test_absent_tensor_says_that_it_is_on_the_device() -> None:
    device = torch.device("cuda", 1)
    twin = meta_twin(X)
    ask = torch.Tensor.device.__get__  # type: ignore[attr-defined]
    assert answer_fact(ask, "device", (twin,), {}, device) == device
    assert answer_fact(None, "is_cuda", (twin,), {}, device) is True
    assert answer_fact(None, "is_meta", (twin,), {}, device) is False
    assert answer_fact(torch.Tensor.dim, "dim", (twin,), {}, device) == 2
