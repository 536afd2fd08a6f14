"""twin_of: the same modules, ties and flags as a model on meta, with numbers that neither vanish nor explode."""

from __future__ import annotations

import torch
from torch import nn

from headway.graph.twin import twin_of


def deep(depth: int = 30, width: int = 64) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    model[0].weight = model[-1].weight
    model[3].requires_grad_(False)
    return model


def test_twin_of_a_model_on_meta() -> None:
    with torch.device("meta"):
        ghost = deep()
    twin = twin_of(ghost)
    assert twin is not None and all(p.is_meta for p in ghost.parameters())
    assert twin[0].weight is twin[-1].weight and not twin[3].weight.requires_grad
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in twin.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in ghost.named_parameters()
    ]
    out = twin(torch.randn(8, 64))
    assert out.isfinite().all() and 0.01 < float(out.detach().std()) < 100
    again = twin_of(ghost)
    assert again is not None and torch.equal(again[0].weight, twin[0].weight)


def test_what_has_values_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    twin = twin_of(model)
    assert twin is not None and torch.equal(twin[0].weight, model[0].weight) and not twin[1].weight.is_meta


def test_what_does_not_fit_has_no_twin() -> None:
    assert twin_of(nn.Linear(1 << 20, 1 << 20, device="meta")) is None
