"""Compares what crosses a slow link between hosts: codecs with gloo's all-reduce, steps of models with torch's DDP.

    python benchmarks/slow_links.py [--rates 1gbit 200mbit] [--hosts 2] [--per-host 1] [--rounds 5] [--megabytes 100]

The hosts are network namespaces of this machine with shaped links, so it needs root and iproute2. In each round every
contender has its turn; printed are medians over rounds, and medians of each round's ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PARTS = ("reduce", "overlap", "train")
FRAME = 1514 / 1448  # bytes of an Ethernet frame that carry 1448 bytes of a TCP stream


@dataclass(frozen=True)
class Setting:
    """What to compare."""

    per_host: int
    rounds: int
    steps: int
    megabytes: int
    layers: int
    width: int
    batch: int


def main() -> None:
    """Make the hosts, run the ranks at each rate, print."""
    from tests.several.hosts import make_hosts, missing

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the all-reduce, at the first rate")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=288)
    parser.add_argument("--batch", type=int, default=8, help="global batch, windows of 128 bytes")
    given = vars(parser.parse_args())
    rates, count, only = given.pop("rates"), given.pop("hosts"), given.pop("only")
    why = missing()
    if why is not None:
        print(f"not run: {why}")
        return
    setting = json.dumps(given)
    with make_hosts(count, rates[0]) as hosts:
        for number, rate in enumerate(rates):
            hosts.shape(rate)
            for what in PARTS[bool(number) :]:  # the all-reduce at the first rate alone
                if only not in (None, what):
                    continue
                outputs = hosts.run_ranks(Path(__file__), what, rate, setting, timeout=900, per_host=given["per_host"])
                lines = outputs[0].splitlines()
                print("\n".join(line.removeprefix("> ") for line in lines if line.startswith("> ")), flush=True)


def rank_main(what: str, rate: str, setting: Setting) -> None:
    """Be one rank of a comparison; rank 0 prints lines that begin with "> "."""
    import torch

    from headway.collective.world import World
    from headway.launch.identity import identify

    torch.set_num_threads(1)
    world = World.start(identify(), deadline=120.0)
    {"reduce": reduce, "overlap": overlap, "train": train}[what](world, rate, setting)
    world.barrier()
    world.close()
    sys.stdout.flush()
    os._exit(0)  # without waiting for torch's threads


def reduce(world: Any, rate: str, setting: Setting) -> None:
    """Compare all-reduces of one tensor."""
    import torch

    from headway.collective.codec import CODECS
    from headway.collective.sums import make_sums
    from headway.collective.two_shot import TwoShot

    values = torch.randn(setting.megabytes * 250_000) * 1e-3
    work, lost = torch.empty_like(values), torch.zeros_like(values)
    engines: dict[str, Any] = {f"two-shot, {name}": TwoShot(world, world.everyone, c) for name, c in CODECS.items()}
    if setting.per_host > 1:
        for name in CODECS:
            engines[f"by host, {name}"] = make_sums(world, world.everyone, name, setting.per_host)
    contenders: dict[str, Callable[[], object]] = {"gloo, float32": lambda: world.all_reduce(work)}
    for name, engine in engines.items():
        kept = lost if engine.feedback else None
        contenders[name] = lambda engine=engine, kept=kept: engine.start(work, residual=kept).wait()  # type: ignore[misc]

    def turn(call: Callable[[], object]) -> float:
        work.copy_(values)
        return timed(world, call)

    seconds = in_rounds(world, contenders, turn, setting.rounds)
    hosts = world.size // setting.per_host
    # Each host has to send and receive 2 (n - 1) / n of the bytes.
    limit = 2 * (hosts - 1) / hosts * values.numel() * 4 * 8 / speed(rate)
    say(world, f"all-reduce of {setting.megabytes} MB, {told(setting, hosts)}, {rate}, {setting.rounds} rounds")
    say(world, f"  float32 at the link's rate: {limit:.3f} s, {limit * FRAME:.3f} s with the headers of its frames")
    table(world, seconds, "gloo, float32", 1.0, "s")


def overlap(world: Any, rate: str, setting: Setting) -> None:
    """Compare steps whose backward sleeps, 25 ms a layer of 4 MB: as an accelerator it leaves the core free."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.collective.reduce import Reducer

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            time.sleep(0.025)
            return gradients

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(Sleep.apply(x))
            return x.sum()

    x = torch.randn(1, 1024)
    models = {name: Sleeper() for name in ("no reduction", "DDP", "Reducer, fp32", "Reducer, fp16", "Reducer, int8")}
    ddp = DistributedDataParallel(models["DDP"])
    reducers = {
        name: Reducer(
            world, world.everyone, dict(model.named_parameters()), codec=name.split()[1], neighbours=setting.per_host
        )
        for name, model in models.items()
        if name.startswith("Reducer")
    }

    def step(name: str) -> None:
        models[name].zero_grad()
        if name in reducers:
            reducers[name].begin(1.0 / world.size)
            reducers[name].arm()
        (ddp if name == "DDP" else models[name])(x).backward()
        if name in reducers:
            reducers[name].finish()

    names = {name: name for name in models}
    in_rounds(world, names, lambda name: timed(world, lambda: step(name)), 2)
    seconds = in_rounds(world, names, lambda name: timed(world, lambda: step(name)), 2 * setting.rounds)
    say(
        world, f"6 layers of 4 MB, backward sleeps 25 ms each, {told(setting, world.size // setting.per_host)}, {rate}:"
    )
    table(world, seconds, "DDP", 1e3, "ms")


def train(world: Any, rate: str, setting: Setting) -> None:
    """Compare steps of the example GPT, a copy a rank: DDP, DDP with torch's hook, FSDP2, and plans with codecs."""
    import torch
    from torch.distributed import init_device_mesh
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import headway

    example = load_example()
    options = example.parse_options([
        "--layers", str(setting.layers), "--width", str(setting.width), "--batch", str(setting.batch)
    ])  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randint(256, (2, setting.batch, options.context), generator=generator))
    half = setting.batch // world.size
    mine = tuple(part[world.rank * half : (world.rank + 1) * half] for part in batch)
    contenders: dict[str, Callable[[], object]] = {}

    def by_ddp(name: str, hook: Any) -> None:
        model = example.build_model(options)
        wrapped = DistributedDataParallel(model) if name != "no reduction" else model
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            example.loss(wrapped, mine).backward()
            optimizer.step()

        contenders[name] = step

    def by_fsdp() -> None:
        model = example.build_model(options)
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            example.loss(model, mine).backward()
            optimizer.step()

        contenders["FSDP2"] = step

    def by_plan(asked: str, shard: str = "none") -> str:
        model = example.build_model(options)
        fixed = {"data": world.size, "num_micro_batches": 1, "codec": asked, "shard": shard}
        plan = headway.plan(model, example.loss, batch, fixed=fixed)
        parallel = headway.parallelize(model, example.loss, plan)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            parallel.forward_backward(parallel.share(batch))
            optimizer.step()

        took = f": {plan.codec}" if asked != plan.codec else ""
        near = f", {plan.neighbours} near" if plan.neighbours > 1 else ""
        shared = f", {shard} shared" if shard != "none" else ""
        contenders[f"headway, {asked}{took}{near}{shared}"] = step
        return next((reason for reason in plan.reasons if "gradients" in reason and "cross" in reason), "")

    by_ddp("no reduction", None)
    by_ddp("DDP", None)
    by_ddp("DDP, fp16_compress_hook", fp16_compress_hook)
    by_fsdp()
    reasons = [by_plan(asked) for asked in ("fp32", "auto", "auto8", "int4", "powersgd")]
    reasons += [by_plan(asked, "optimizer") for asked in ("fp32", "auto")]

    def turn(step: Callable[[], object]) -> float:
        return timed(world, lambda: [step() for _ in range(setting.steps)]) / setting.steps

    in_rounds(world, contenders, turn, 1)  # DDP and the Reducer order their buckets anew after the first step
    seconds = in_rounds(world, contenders, turn, setting.rounds)
    size = sum(p.numel() for p in example.build_model(options).parameters())
    where = told(setting, world.size // setting.per_host)
    say(world, f"GPT of {size / 1e6:.1f} M parameters, {where}, {rate}, global batch {setting.batch}, a step:")
    table(world, seconds, "DDP", 1e3, "ms")
    for reason in dict.fromkeys(reasons):
        say(world, f"  plan: {reason}" if reason else "")


def told(setting: Setting, hosts: int) -> str:
    """Say how many hosts and ranks there are."""
    return f"{hosts} hosts" + (f" of {setting.per_host} ranks" if setting.per_host > 1 else "")


def in_rounds(world: Any, contenders: dict[str, Any], turn: Callable[[Any], float], rounds: int) -> dict[str, list]:
    """Give every contender its turn in each round, in an order that changes; return seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(turn(contenders[name]))
    return seconds


def timed(world: Any, call: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done it."""
    world.barrier()
    started = time.perf_counter()
    call()
    world.barrier()
    return time.perf_counter() - started


def table(world: Any, seconds: dict[str, list[float]], base: str, scale: float, unit: str) -> None:
    """Print the median of each, and of how many times faster than the base it is."""
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[base], times, strict=True))
        say(world, f"  {name:<36} {statistics.median(times) * scale:8.3g} {unit}   {ratio:5.2f}x {base}")


def say(world: Any, text: str) -> None:
    """Print a line on rank 0."""
    if world.rank == 0 and text:
        print(f"> {text}", flush=True)


def speed(rate: str) -> float:
    """Return the bits per second of a rate as `tc` writes it."""
    unit = next(unit for unit in BITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * BITS[unit]


def load_example() -> Any:
    """Import examples/gpt.py."""
    spec = importlib.util.spec_from_file_location("example_gpt", ROOT / "examples" / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in PARTS:
        rank_main(sys.argv[1], sys.argv[2], Setting(**json.loads(sys.argv[3])))
    else:
        main()
