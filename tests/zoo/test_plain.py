"""Model families in torch alone: cut at random in two to four, they train as whole, on this batch and on another."""

from __future__ import annotations

import random

import pytest
import torch

from headway.errors import SplitError
from headway.graph.record import record
from headway.layout.split import split
from tests.run.staged import difference, train_staged, train_whole
from tests.zoo import plain, plain_loops, plain_training, research_learning, research_shapes, research_views

RESEARCH = (
    "soft_actor_critic langevin_energy swapped_assignments physics_informed derivatives_by_transforms "
    "bayes_by_backprop searched_cells"
)
FAMILIES = plain.FAMILIES | plain_loops.FAMILIES | plain_training.FAMILIES
OTHERS = research_learning.FAMILIES | research_views.FAMILIES | research_shapes.FAMILIES
FAMILIES |= {name: OTHERS[name] for name in RESEARCH.split()}
ANOTHER_WAY = ("early_exit", "tree_recursion")
"""Families whose other batch may need what no call had shown: then a cut inside is refused, never wrong."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
@pytest.mark.filterwarnings("ignore::UserWarning")  # lazy modules and nested tensors are announced as new
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_train_as_the_whole(family: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = FAMILIES[family]()
    if family != "mixed_precision":
        model.double()
    torch.manual_seed(7)
    _, _, other = FAMILIES[family]()
    graph = record(model, loss, batch)
    batches = [batch, other]
    wanted = [train_whole(model, loss, each, graph) for each in batches]
    draw = random.Random(family)
    for stages in (2, 3, 4):
        places = sorted(draw.sample(range(len(graph.cuts)), min(stages - 1, len(graph.cuts))))
        cuts = [graph.cuts[i].name for i in places]
        for want, each in zip(wanted, batches, strict=True):
            try:
                got = train_staged(model, loss, each, graph.samples, split(graph, cuts))
            except SplitError:
                if family in ANOTHER_WAY and each is other:
                    continue
                raise
            assert difference(want, got) < 1e-10, cuts
