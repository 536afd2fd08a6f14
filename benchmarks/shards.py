"""Copies that share out states, gradients or parameters: their steps beside DDP's and FSDP2's, their memory as planned.

    python benchmarks/shards.py [--rounds 12] [--only speed|memory|hosts] [--layers 6] [--width 288] ...

Two gloo ranks with one thread each, the example's GPT, AdamW. `none`, `optimizer` and `gradients` take turns with DDP,
`parameters` with FSDP2 as torch has it (the same blocks, gloo's own collectives), in one run each. Memory is what a
fresh process holds at most in three steps above what it held before there was a model, beside what the plan expects.

`hosts`: two network namespaces with a shaped link (root and iproute2 needed), --per-host ranks on each. All ways and
DDP take turns in one run, `optimizer` and `gradients` also as if new values were awaited before the forward begins, and
with several ranks a host, host by host and among all. With --sleep six layers of 4 MB sleep 25 ms in the forward and
25 ms in the backward each, as an accelerator leaves the cores free.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import alternate, example, load, on_ranks
from slow_links import in_rounds, say, table, timed
from steps_vs_torch import adamw, our_step, setting
from torch import nn

Options = argparse.Namespace
SHARDS = ("none", "optimizer", "gradients", "parameters")


class Sleep(torch.autograd.Function):
    """Takes 25 ms forward, and 25 ms back, as an accelerator would: the cores are free."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.025)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(0.025)
        return gradients


class Sleeper(nn.Module):
    """Six layers of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = Sleep.apply(block(x))
        return x


def task(options: Options) -> tuple[Any, Any, Any]:
    """Make a model, its loss and a batch: the example's GPT, or layers that sleep."""
    if not options.sleep:
        model, batch = setting(options)
        return model, example("gpt").loss, batch
    torch.manual_seed(0)
    return Sleeper(), lambda model, batch: model(batch[0]).square().mean(), (torch.randn(options.batch, 1024),)


class Everything:
    """Names of all parameters: those that are awaited at once."""

    def __contains__(self, name: object) -> bool:
        return True


def plan_for(world: Any, options: Options, shard: str, **more: Any) -> tuple[Any, Any, Any]:
    """Make the model, the batch and a plan with a copy on each rank."""
    import headway

    model, loss, batch = task(options)
    fixed = {"data": world.size, "pipeline": 1, "num_micro_batches": options.micros, "shard": shard, **more}
    return model, batch, headway.plan(model, loss, batch, cluster=f"{world.size}xcpu:8GiB", fixed=fixed)


def parallel_for(world: Any, options: Options, model: Any, plan: Any) -> Any:
    """Put a model under a plan."""
    from headway.run.parallel import ParallelModel

    return ParallelModel(model, task(options)[1], plan, world)


def torch_step(world: Any, options: Options, model: Any, batch: Any, shard: str) -> Callable[[], Any]:
    """Return a step of DDP, or of FSDP2 with each block gathered by itself."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    loss = task(options)[1]
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
    model, batch, plan = plan_for(world, options, shard)
    reference = copy.deepcopy(model)
    ours = our_step(parallel_for(world, options, model, plan), batch)
    theirs = torch_step(world, options, reference, batch, shard)
    ratio = alternate(world, ours, theirs, rounds=options.rounds, steps=options.steps)
    if world.rank == 0:
        peer = "FSDP2" if shard == "parameters" else "DDP"
        print(f"shard={shard}, {options.micros} micro-batch(es) a copy, with {peer}; {load()}\n{ratio}", flush=True)


def memory(world: Any, options: Options, shard: str) -> None:
    """Take three steps and say what they took at most."""
    from headway.run.memory import Meter
    from headway.units import format_bytes

    model, batch, plan = plan_for(world, options, shard)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    meter = Meter.start(world.device, already=size)
    parallel = parallel_for(world, options, model, plan)
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


def hosts(world: Any, options: Options) -> None:
    """Time steps of all ways in turn, over the link between hosts."""
    contenders: dict[str, Callable[[], Any]] = {}
    model, _, batch = task(options)
    contenders["DDP"] = torch_step(world, options, model, batch, "none")
    groups = (options.per_host, world.size) if options.per_host > 1 else (world.size,)
    for shard in SHARDS:
        for ranks in groups if shard != "none" else (None,):
            for codec in ("fp32", "fp16") if options.codecs else ("fp32",):
                more = {"codec": codec} | ({"shard_ranks": ranks} if ranks else {})
                model, batch, plan = plan_for(world, options, shard, **more)
                parallel = parallel_for(world, options, model, plan)
                how = ", by host" if plan.shard_ranks else ""
                contenders[f"{shard}, {codec}{how}"] = our_step(parallel, batch)
                if shard in ("optimizer", "gradients") and codec == "fp32":
                    contenders[f"{shard}{how}, awaited first"] = awaited_first(world, options, plan)
    if options.per_host == 1:
        contenders["FSDP2"] = torch_step(world, options, task(options)[0], batch, "parameters")

    def turn(step: Callable[[], Any]) -> float:
        return timed(world, lambda: [step() for _ in range(options.steps)]) / options.steps

    in_rounds(world, contenders, turn, 2)
    seconds = in_rounds(world, contenders, turn, options.rounds)
    say(
        world,
        f"{world.size} ranks, {options.per_host} a host, {options.rate}, {options.micros} micro-batches; {load()}",
    )
    table(world, seconds, "DDP", 1e3, "ms")


def awaited_first(world: Any, options: Options, plan: Any) -> Callable[[], Any]:
    """Return a step that awaits all new values before its forward."""
    model, _, batch = task(options)
    parallel = parallel_for(world, options, model, plan)
    reducer = parallel._kept.reducer
    spread = reducer.spread
    reducer.spread = lambda at_once=None: spread(Everything())
    return our_step(parallel, batch)


def on_hosts(options: Options) -> None:
    """Make two hosts and run `hosts` on them."""
    from tests.several.hosts import make_hosts, missing

    why = missing()
    if why is not None:
        print(f"not run: {why}")
        return
    with make_hosts(2, options.rate) as made:
        outputs = made.run_ranks(
            Path(__file__), "rank", json.dumps(vars(options)), timeout=1500, per_host=options.per_host
        )  # fmt: skip
    print("\n".join(line.removeprefix("> ") for line in outputs[0].splitlines() if line.startswith("> ")), flush=True)


def rank_main(options: Options) -> None:
    """Be one rank on a host."""
    from headway.collective.world import World
    from headway.launch.identity import identify

    torch.set_num_threads(1)
    world = World.start(identify(), deadline=120.0)
    hosts(world, options)
    world.barrier()
    world.close()
    sys.stdout.flush()
    os._exit(0)  # without waiting for torch's threads


def main() -> None:
    """Run all comparisons that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="steps in a round")
    parser.add_argument("--only", choices=("speed", "memory", "hosts"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=288)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="global batch")
    parser.add_argument("--micros", type=int, default=2, help="micro-batches of a copy")
    parser.add_argument("--sleep", action="store_true", help="layers that sleep instead of the GPT")
    parser.add_argument("--rate", default="1gbit", help="of the link between hosts")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--codecs", action="store_true", help="over hosts, fp16 too")
    options = parser.parse_args()
    if options.only in (None, "hosts"):
        on_hosts(options)
    for shard in SHARDS if options.only in (None, "speed") else ():
        on_ranks(2, speed, options, shard)
    large = argparse.Namespace(**{**vars(options), "width": 2 * options.width})
    for shard in SHARDS if options.only in (None, "memory") else ():
        on_ranks(2, memory, large, shard)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "rank":
        rank_main(argparse.Namespace(**json.loads(sys.argv[2])))
    else:
        main()
