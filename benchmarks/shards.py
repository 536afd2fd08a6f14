"""Copies that share out states, gradients or parameters: their steps beside DDP's and FSDP2's, their memory as planned.

    python benchmarks/shards.py [--rounds 12] [--only speed|memory] [--layers 6] [--width 288] ...

Two gloo ranks with one thread each, the example's GPT, AdamW. `none`, `optimizer` and `gradients` take turns with DDP,
`parameters` with FSDP2 as torch has it (the same blocks, gloo's own collectives), in one run each. Memory is what a
fresh process holds at most in three steps above what it held before there was a model, beside what the plan expects.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from rounds import alternate, example, load, on_ranks
from steps_vs_torch import adamw, our_step, setting

Options = argparse.Namespace
SHARDS = ("none", "optimizer", "gradients", "parameters")


def plan_for(world: Any, options: Options, shard: str) -> tuple[Any, Any, Any]:
    """Make the model, the batch and a plan for two copies."""
    import headway

    model, batch = setting(options)
    fixed = {"data": 2, "pipeline": 1, "num_micro_batches": options.micros, "shard": shard}
    return model, batch, headway.plan(model, example("gpt").loss, batch, cluster=f"{world.size}xcpu:8GiB", fixed=fixed)


def torch_step(world: Any, options: Options, model: Any, batch: Any, shard: str) -> Callable[[], Any]:
    """Return a step of DDP, or of FSDP2 with each block gathered by itself."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    loss = example("gpt").loss
    if shard == "parameters":
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh=list(range(world.size)))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = adamw(wrapped.parameters())
    part = options.batch // world.size
    pieces = list(zip(*(leaf[world.rank * part :][:part].chunk(options.micros) for leaf in batch), strict=True))

    def step() -> Any:
        optimizer.zero_grad()
        for piece in pieces:
            if shard != "parameters":
                wrapped.require_backward_grad_sync = piece is pieces[-1]
            value = loss(wrapped, piece) / options.micros
            value.backward()
        optimizer.step()
        return value

    return step


def speed(world: Any, options: Options, shard: str) -> None:
    """Time steps of ours and torch's in turn."""
    from headway.run.parallel import ParallelModel

    model, batch, plan = plan_for(world, options, shard)
    reference = copy.deepcopy(model)
    ours = our_step(ParallelModel(model, example("gpt").loss, plan, world), batch)
    theirs = torch_step(world, options, reference, batch, shard)
    ratio = alternate(world, ours, theirs, rounds=options.rounds, steps=options.steps)
    if world.rank == 0:
        peer = "FSDP2" if shard == "parameters" else "DDP"
        print(f"shard={shard}, {options.micros} micro-batch(es) a copy, with {peer}; {load()}\n{ratio}", flush=True)


def memory(world: Any, options: Options, shard: str) -> None:
    """Take three steps and say what they took at most."""
    from headway.run.memory import Meter
    from headway.run.parallel import ParallelModel
    from headway.units import format_bytes

    model, batch, plan = plan_for(world, options, shard)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    meter = Meter.start(world.device, already=size)
    parallel = ParallelModel(model, example("gpt").loss, plan, world)
    del model
    step = our_step(parallel, batch)
    for _ in range(3):
        step()
    peaks = world.gather_objects(meter.peak())
    if world.rank == 0:
        most = max(peaks)
        print(
            f"shard={shard:<10} {options.micros} micro-batch(es), {format_bytes(size)} of parameters: "
            f"{format_bytes(most)} at most, {format_bytes(max(plan.memory))} planned ({max(plan.memory) / most:.2f})",
            flush=True,
        )


def main() -> None:
    """Run all comparisons that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="steps in a round")
    parser.add_argument("--only", choices=("speed", "memory"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=288)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="global batch")
    parser.add_argument("--micros", type=int, default=2, help="micro-batches of a copy")
    options = parser.parse_args()
    for shard in SHARDS if options.only != "memory" else ():
        on_ranks(2, speed, options, shard)
    large = argparse.Namespace(**{**vars(options), "width": 2 * options.width})
    for shard in SHARDS if options.only != "speed" else ():
        on_ranks(2, memory, large, shard)


if __name__ == "__main__":
    main()
