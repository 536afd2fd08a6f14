"""Compares whole training steps with torch: data parallelism with DDP, pipelines with its schedules; same GPT and cuts.

    python benchmarks/steps_vs_torch.py [--rounds 20] [--only data|pipeline] [--layers 6] [--width 288] ...

Two gloo ranks with one thread each. A step is forward, backward, reduction and AdamW; Headway's is what a user calls,
`ParallelModel.forward_backward`, with all that it does at the end of a step (global loss, peak memory, timeline).
Prints medians and ratios (below 1: Headway is faster). First, both must give the same loss and gradients.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rounds import alternate, example, load, on_ranks

Options = argparse.Namespace

PIPELINES = {"one_f_one_b": (1, "Schedule1F1B"), "interleaved": (2, "ScheduleInterleaved1F1B")}
"""The schedules that are compared: stages on each rank, and what torch calls it."""


def setting(options: Options) -> tuple[Any, Any]:
    """Make the example's GPT and a global batch; the same on every rank."""
    import torch

    torch.manual_seed(0)
    model = example("gpt").GPT(options.layers, options.width, options.heads, options.context)
    window = torch.randint(0, 256, (options.batch, options.context + 1))
    return model, (window[:, :-1].contiguous(), window[:, 1:].contiguous())


def parallel_model(world: Any, model: Any, batch: Any, fixed: dict[str, Any]) -> Any:
    """Put the model under a plan of ours with these decisions."""
    import headway
    from headway.run.parallel import ParallelModel

    loss = example("gpt").loss
    plan = headway.plan(model, loss, batch, cluster=f"{world.size}xcpu:8GiB", fixed=fixed)
    return ParallelModel(model, loss, plan, world)


def adamw(parameters: Any) -> Any:
    """Make the optimizer of both sides; its steps are too small to change anything."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-5)


def our_step(parallel: Any, batch: Any) -> Callable[[], Any]:
    """Return a training step of ours."""
    optimizer = adamw(parallel.parameters())
    share = parallel.share(batch)

    def step() -> Any:
        optimizer.zero_grad()
        value = parallel.forward_backward(share)
        optimizer.step()
        return value

    return step


def check(world: Any, ours: Any, theirs: Any, mine: Iterator[Any], reference: Iterator[Any]) -> str:
    """Compare the first step's loss and this rank's gradients; say how far they are apart, exit when too far."""
    import torch

    worst = abs(float(ours) - float(theirs)) / abs(float(theirs))
    table = dict(reference)
    for name, parameter in mine:
        a, b = parameter.grad, table[name].grad
        worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    both = torch.tensor([worst], dtype=torch.float64)
    world.all_reduce(both, op="max")
    if not float(both) < 1e-3:
        sys.exit(f"loss or gradients differ by {float(both):.1e} of the largest")
    return f"loss and gradients agree to {float(both):.0e}"


def data_parallel(world: Any, options: Options, micros: int) -> None:
    """Compare with DDP; with several micro-batches DDP accumulates them under no_sync."""
    from torch.nn.parallel import DistributedDataParallel

    loss = example("gpt").loss
    model, batch = setting(options)
    reference = copy.deepcopy(model)
    parallel = parallel_model(world, model, batch, {"data": 2, "pipeline": 1, "num_micro_batches": micros})
    ours = our_step(parallel, batch)
    ddp = DistributedDataParallel(reference)
    optimizer = adamw(ddp.parameters())
    part = options.batch // 2
    share = tuple(leaf[world.rank * part : (world.rank + 1) * part] for leaf in batch)
    pieces = list(zip(*(leaf.chunk(micros) for leaf in share), strict=True))

    def theirs() -> Any:
        optimizer.zero_grad()
        with ddp.no_sync():
            for piece in pieces[:-1]:
                (loss(ddp, piece) / micros).backward()
        value = loss(ddp, pieces[-1]) / micros
        value.backward()
        optimizer.step()
        return value

    ours_first, _ = ours(), theirs()
    with_all = float(loss(setting(options)[0], batch).detach())
    agreed = check(world, ours_first, with_all, parallel.named_parameters(), reference.named_parameters())
    ratio = alternate(world, ours, theirs, rounds=options.rounds, steps=options.steps)
    if world.rank == 0:
        print(f"data parallelism, 2 copies, {micros} micro-batch(es) each, with DDP ({agreed}); {load()}\n{ratio}")


def pieces_of(model: Any, count: int) -> tuple[list[Any], list[int]]:
    """Cut a GPT by hand between its blocks, as torch.distributed.pipelining wants it; give also where."""
    from torch import nn
    from torch.nn import functional

    bounds = [stage * len(model.blocks) // count for stage in range(count + 1)]

    class Piece(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.first, self.last = stage == 0, stage == count - 1
            if self.first or self.last:
                self.token = model.token
            if self.first:
                self.position = model.position
            if self.last:
                self.norm = model.norm
            self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(bounds[stage], bounds[stage + 1])})

        def forward(self, x: Any) -> Any:
            import torch

            if self.first:
                x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks.values():
                x = block(x)
            return functional.linear(self.norm(x), self.token.weight) if self.last else x

    return [Piece(stage) for stage in range(count)], bounds[1:-1]


def pipeline(world: Any, options: Options, name: str, micros: int) -> None:
    """Compare with torch's schedule; the gradient of the tied embedding is summed over its two stages by hand there."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    chunks, kind = PIPELINES[name]
    model, batch = setting(options)
    modules, bounds = pieces_of(copy.deepcopy(model), 2 * chunks)
    fixed = {
        "data": 1, "pipeline": 2, "chunks": chunks, "num_micro_batches": micros, "schedule": name,
        "cuts": tuple(f"blocks.{bound}" for bound in bounds),
    }  # fmt: skip
    parallel = parallel_model(world, model, batch, fixed)
    ours = our_step(parallel, batch)
    mine = torch.nn.ModuleList(modules[world.rank :: 2])
    optimizer = adamw(mine.parameters())
    places = range(world.rank, 2 * chunks, 2)
    stages = [pipelining.PipelineStage(modules[at], at, 2 * chunks, torch.device("cpu")) for at in places]

    def loss_of(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    given: Any = stages if chunks > 1 else stages[0]
    schedule = getattr(pipelining.schedules, kind)(given, n_microbatches=micros, loss_fn=loss_of)
    tied = modules[0].token.weight if world.rank == 0 else modules[-1].token.weight

    def theirs() -> Any:
        optimizer.zero_grad()
        losses: list[Any] = []
        if world.rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        dist.all_reduce(tied.grad)
        optimizer.step()
        return sum(losses) / micros if losses else None

    ours_first, their_first = ours(), theirs()
    their_first = world.broadcast_object(None if their_first is None else float(their_first.detach()), source=1)
    reference = {name: p for module in mine for name, p in module.named_parameters()}
    agreed = check(world, ours_first, their_first, parallel.named_parameters(), iter(reference.items()))
    ratio = alternate(world, ours, theirs, rounds=options.rounds, steps=options.steps)
    if world.rank == 0:
        print(f"{name}, {2 * chunks} stages, {micros} micro-batches, with {kind} ({agreed}); {load()}\n{ratio}")


def all_of_it(world: Any, options: Options) -> None:
    """Run what was asked for."""
    if world.rank == 0:
        model, _ = setting(options)
        size = sum(p.numel() for p in model.parameters())
        print(
            f"GPT, {options.layers} layers x {options.width}, {size / 1e6:.1f} M parameters, global batch "
            f"{options.batch} x {options.context}; {options.rounds} rounds of {options.steps} step(s) each; "
            "Headway, torch, ratio",
            flush=True,
        )
    if options.only in (None, "data"):
        for micros in (1, 2):
            data_parallel(world, options, micros)
    if options.only in (None, "pipeline"):
        for name in PIPELINES:
            for micros in (4, 8):
                pipeline(world, options, name, micros)


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 6), ("width", 288), ("heads", 6), ("context", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="steps of each in a round")
    parser.add_argument("--only", choices=("data", "pipeline"))
    on_ranks(2, all_of_it, parser.parse_args(), timeout=1200.0)


if __name__ == "__main__":
    main()
