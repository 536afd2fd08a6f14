"""Compares what a plan expects of a step with what happens: the example's GPT under every schedule, and copies.

    python benchmarks/predictions.py [--ranks 2] [--rounds 10] [--micro-batches 8] [--layers 8] [--width 288] ...

Real computation, planned as for a user: calls are timed here, afresh, on all ranks at once. Headway chooses the cuts. A
step is forward, backward, what ranks tell each other, and AdamW. Give at most as many ranks as there are cores: a plan
takes each rank to have one of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

from rounds import example, load, on_ranks

CHUNKED = ("interleaved", "breadth_first", "zero_bubble_v", "dual_pipe_v")
SCHEDULES = ("gpipe", "one_f_one_b", "backward_first", "zero_bubble", "zero_bubble_h2", *CHUNKED, "searched")


def happened(world: Any, plan: Any, model: Any, batch: Any, rounds: int) -> float:
    """Return the median seconds of a step on the slowest rank."""
    import torch

    from headway.run.parallel import ParallelModel

    parallel = ParallelModel(model, example("gpt").loss, plan, world)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5)
    share = parallel.share(batch)
    seconds = []
    for number in range(rounds + 3):
        world.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        parallel.forward_backward(share)
        optimizer.step()
        spent = torch.tensor([time.perf_counter() - start])
        world.all_reduce(spent, op="max")
        if number >= 3:  # the first ones learn shapes and make the optimizer's states
            seconds.append(float(spent))
    return statistics.median(seconds)


def compare(world: Any, options: argparse.Namespace, home: str) -> None:
    """Plan and run each."""
    import torch

    import headway

    os.environ |= {
        "HOME": home, "RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.rank),
        "LOCAL_WORLD_SIZE": str(world.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    gpt = example("gpt")
    pipelines: list[dict[str, object]] = [
        {"data": 1, "pipeline": world.size, "schedule": name, "chunks": 2 if name in CHUNKED else 1}
        for name in SCHEDULES
    ]
    errors = []
    for fixed in [{"data": world.size, "pipeline": 1}, *pipelines]:
        torch.manual_seed(0)
        model = gpt.GPT(options.layers, options.width, options.heads, options.context)
        micros = options.micro_batches if "schedule" in fixed else 1
        samples = options.micro_batches * options.samples if "schedule" in fixed else world.size * options.samples
        window = torch.randint(0, 256, (samples, options.context + 1))
        batch = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        plan = headway.plan(model, gpt.loss, batch, fixed={**fixed, "num_micro_batches": micros}, verify=False)
        spent = happened(world, plan, model, batch, options.rounds)
        errors.append(plan.seconds / spent - 1)
        if world.rank == 0:
            print(
                f"  {str(fixed.get('schedule', 'copies')):<16} planned {plan.seconds * 1e3:7.1f} ms, happened "
                f"{spent * 1e3:7.1f} ms: {errors[-1]:+.1%}",
                flush=True,
            )
    if world.rank == 0:
        print(f"  mean error {statistics.mean(map(abs, errors)):.1%}, mean {statistics.mean(errors):+.1%}; {load()}")


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 8), ("width", 288), ("heads", 6), ("context", 128), ("samples", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"GPT, {options.layers} layers x {options.width}, {options.ranks} ranks; {load()}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        on_ranks(options.ranks, compare, options, home, timeout=1200.0)


if __name__ == "__main__":
    main()
