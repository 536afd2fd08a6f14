"""Composition on real processes: adapters, compiled blocks and parametrized layers in 2 stages."""

from __future__ import annotations

import pytest
import torch

import headway
from headway.collective.world import World
from headway.run.microbatch import cut
from headway.run.parallel import ParallelModel
from tests.run.test_composition import Case, changed, compiled_modules, hooks_that_change, lora, quantised
from tests.several.ranks import on_ranks

MICRO_BATCHES = 2


def adapters() -> Case:
    """LoRA without dropout: one process draws other masks than each sample by itself."""
    model, loss, batch = lora()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, loss, torch.cat([batch, batch.flip(0)])[:4]


def spectral() -> Case:
    return changed(torch.nn.utils.parametrizations.spectral_norm)


def orthogonal() -> Case:
    return changed(torch.nn.utils.parametrizations.orthogonal)


CASES = (adapters, compiled_modules, spectral, orthogonal, hooks_that_change, quantised)


def compare(world: World) -> list[str]:
    """Compare each case with one process that runs the same micro-batches in order; say which differ."""
    wrong = []
    for case in CASES:
        torch.manual_seed(0)
        plain, loss, batch = case()
        torch.manual_seed(world.rank)  # rank 0's weights go to all
        model = case()[0]
        if world.rank == 0:
            torch.manual_seed(0)
            model = case()[0]
        fixed = {"data": 1, "pipeline": 2, "num_micro_batches": MICRO_BATCHES}
        plan = headway.plan(model, loss, batch, cluster=f"{world.size}xcpu:4GiB", fixed=fixed)
        parallel = ParallelModel(model, loss, plan, world)
        value = parallel.forward_backward(parallel.share(batch))
        size = len(batch) // MICRO_BATCHES
        losses = [loss(plain, cut(batch, i * size, (i + 1) * size)) / MICRO_BATCHES for i in range(MICRO_BATCHES)]
        sum(losses).backward()
        far = abs(float(value) - float(sum(losses)))
        want = dict(plain.named_parameters())
        for name, parameter in parallel.named_parameters():
            if parameter.requires_grad and want[name].grad is not None:
                scale = float(want[name].grad.abs().max()) + 1e-12
                far = max(far, float((parameter.grad - want[name].grad).abs().max()) / scale)
        if not far < 1e-10:
            wrong.append(f"{case.__name__}: {far:.1e}")
    return wrong


@pytest.mark.several
def test_composes_on_two_ranks() -> None:
    assert on_ranks(2, compare, timeout=100.0) == [[], []]
