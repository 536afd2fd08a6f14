"""Failures: an error in the user's code, on a random rank at a random place and micro-batch, ends all ranks, named.

`python -m tests.soak.failures --first 0 --count 10 --ranks 2 4`
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import nn

from headway.collective.world import World
from headway.errors import HeadwayError
from headway.run.parallel import ParallelModel
from tests.several.ranks import SOON, outcomes_on_ranks
from tests.soak.cases import Case, case_of
from tests.soak.programs import Recipe, batch_of, build, loss_of, recipe
from tests.soak.training import optimizer_of, own, plan_for, sizes_of

# Orders after which a batch may be refused, or what a layer does is done elsewhere again.
TROUBLE = frozenset({"loop", "branch", "batchnorm", "experts", "select", "residual_inplace", "view_write", "index_put"})


def spring(layer: nn.Module, backward: bool, turn: int) -> None:
    """Have a layer raise at its call number `turn`, or where that call's gradient comes."""
    calls = [0]
    original = layer.forward

    def raises(gradient: torch.Tensor) -> None:
        raise LookupError("a gradient that is not liked")

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        out: torch.Tensor = original(x)
        if calls[0] == turn + 1 and backward:
            out.register_hook(raises)
        elif calls[0] == turn + 1:
            raise LookupError("a sample that is not liked")
        return out

    layer.forward = forward  # type: ignore[method-assign]


def drawn(seed: int, size: int) -> tuple[Recipe, Case]:
    """Draw a program whose last layer, at least, is called once, and how it is trained."""
    return recipe(seed, without=TROUBLE), case_of(seed, size)


def fails(world: World, seed: int, size: int) -> str:
    """Train two steps, in the second of which one rank meets the trap; the first rank says where it lies."""
    made, case = drawn(seed, size)
    rng = random.Random(seed)
    plan = plan_for(case.ways[0], made, case)
    model, loss = build(made), loss_of(made)
    parallel = ParallelModel(model, loss, plan, world)
    optimizer = optimizer_of(case.optimizer, parallel.parameters())
    batch = batch_of(made, case.samples, 0)
    parallel.forward_backward(parallel.share(own(batch)))
    optimizer.step()
    optimizer.zero_grad()
    layer = f"body.own.{len(made.orders) - 2}"  # the last "linear": all samples go through it, and the loss follows
    assert plan.split is not None
    stage = next(part for part in plan.split.stages if f"{layer}.weight" in part.parameters).index
    holders = [rank for rank in range(size) if plan.lowered.placement[stage] == rank // plan.data]
    unlucky = rng.choice(holders)
    backward = rng.random() < 0.5
    turn = rng.randrange(min(map(len, sizes_of(plan, case.samples))))
    if world.rank == unlucky:
        print(f"trap {unlucky} {layer} {'backward' if backward else 'forward'} of micro-batch {turn}", flush=True)
        spring(model.get_submodule(layer), backward, turn)
    parallel.forward_backward(parallel.share(own(batch)))
    raise AssertionError("nothing was raised")


def look(seed: int, size: int, *, soon: float = SOON) -> list[str]:
    """Run one failure, and say what is not as it should be."""
    outcomes = outcomes_on_ranks(size, fails, seed, size, timeout=90.0, deadline=60.0)
    trap = [(rank, outcome) for rank, outcome in enumerate(outcomes) if "trap " in outcome.output]
    if not trap:
        refused = isinstance(outcomes[0].error, HeadwayError)
        return [f"{'refused' if refused else 'before the trap'}: {outcomes[0].error!r}\n{outcomes[0].trace[-600:]}"]
    rank, first = trap[0]
    line = next(line for line in first.output.splitlines() if line.startswith("trap "))
    _, _, layer, *what = line.split()
    found = []
    if not isinstance(first.error, LookupError):
        return [f"rank {rank} should have raised and ended with {first.error!r} ({line})\n{first.trace}"]
    notes = first.trace.rpartition("liked")[2]
    # which module's gradient it was that raised, autograd does not tell
    for part in (" ".join(what), *((f"module {layer}",) if what[0] == "forward" else ())):
        if part not in notes:
            found.append(f"the error does not say {part!r}: {notes.strip()!r} ({line})")
    for other, outcome in enumerate(outcomes):
        if outcome.error is None:
            found.append(f"rank {other} never ended ({line})")
        elif outcome.seconds - first.seconds > soon:
            found.append(f"rank {other} ended {outcome.seconds - first.seconds:.1f} s later: {outcome.error!r}")
        elif other != rank and not getattr(outcome.error, "consequence", False):
            found.append(f"rank {other} raised {outcome.error!r}, which is no consequence")
    return found


def main() -> int:
    """Try many, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    bad = 0
    for size in given.ranks:
        for seed in range(given.first, given.first + given.count):
            found: list[Any] = look(seed, size)
            refused = [text for text in found if text.startswith("refused")]
            bad += len(found) - len(refused)
            print(f"failure {seed} on {size}: {'; '.join(found) or 'all ranks ended, named'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
