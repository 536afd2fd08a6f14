"""Trains the example GPT on four ranks with each codec and several seeds, and compares losses on held-out files.

    python benchmarks/codec_quality.py [--steps 1000] [--seeds 3] [--codecs fp32 fp16 int8 int4] [--sync-every 8 32]

The default size takes hours on two cores; `--steps 200 --layers 4 --width 192 --context 64` some half an hour. Printed
are bits per held-out byte: each seed's, and each codec's mean difference from fp32 beside how far seeds are apart.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

from rounds import example, load, on_ranks


def main() -> None:
    """Read the command line, run the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codecs", nargs="*", default=["fp32", "fp16", "int8", "int4", "powersgd"])
    parser.add_argument("--sync-every", nargs="*", type=int, default=[8, 32], help="steps between syncs, exact ones")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=288)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=24 * 3600.0)
    given = parser.parse_args()
    on_ranks(given.ranks, compare, vars(given), timeout=given.timeout)


def compare(world: Any, given: dict[str, Any]) -> None:
    """Train everything on this rank; rank 0 prints."""
    ways: dict[str, dict[str, Any]] = {codec: {"codec": codec} for codec in given["codecs"]}
    ways |= {f"sync_every={every}": {"codec": "fp32", "sync_every": every} for every in given["sync_every"]}
    bits: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(given["seeds"]):
        for name, found in bits.items():
            started = time.perf_counter()
            found.append(train(world, ways[name], seed, given))
            say(world, f"seed {seed}, {name:<13} {found[-1]:.4f} bits per held-out byte, {_spent(started)}; {load()}")
    exact = bits.get("fp32")
    for name, found in bits.items():
        line = f"{name:<13} mean {statistics.mean(found):.4f}"
        if exact is not None and name != "fp32":
            differences = [a - b for a, b in zip(found, exact, strict=True)]
            line += f", {statistics.mean(differences):+.4f} to fp32 (each seed: "
            line += ", ".join(f"{difference:+.4f}" for difference in differences) + ")"
        if len(found) > 1:
            line += f", seeds differ by {max(found) - min(found):.4f}"
        say(world, line)


def train(world: Any, way: dict[str, Any], seed: int, given: dict[str, Any]) -> float:
    """Train once, with what is fixed; return bits per held-out byte."""
    import torch

    import headway
    from headway.run.parallel import ParallelModel

    gpt = example("gpt")
    names = ("steps", "layers", "width", "context", "batch")
    options = gpt.parse_options([text for name in names for text in (f"--{name}", str(given[name]))])
    options.seed = seed
    model = gpt.build_model(options)
    loader, held_out = gpt.build_loaders(options)
    fixed = {"data": world.size, "num_micro_batches": 1, **way}
    machine = f"{world.size}xcpu:4GiB"
    plan = headway.plan(model, gpt.loss, next(iter(loader)), cluster=machine, fixed=fixed)
    parallel = ParallelModel(model, gpt.loss, plan, world)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: gpt.learning_rate(step, options.steps))
    for batch in loader:
        optimizer.zero_grad()
        parallel.forward_backward(parallel.share(batch))
        parallel.clip_grad_norm(1.0)
        optimizer.step()
        schedule.step()
    parallel.eval()
    losses = [float(parallel.evaluate(parallel.share(batch))) for batch in held_out]
    return statistics.mean(losses) / math.log(2)


def say(world: Any, text: str) -> None:
    """Print on rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def _spent(started: float) -> str:
    return f"{time.perf_counter() - started:.0f} s"


if __name__ == "__main__":
    main()
