"""Ledger: what a recording held of the model is let go of with it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from headway.graph.record import record
from tests.graph.programs import square


def test_a_recorded_model_can_go() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    graphs = [record(model, square, torch.randn(samples, 4)) for samples in (2, 3)]
    parameter = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert parameter() is None and graphs[0].num_parameters == 40
