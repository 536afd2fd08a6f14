"""Measures what a stage costs beyond its own calls, what passing over layers costs, and how long recording takes.

    python benchmarks/stage_overhead.py [--rounds 60] [--no-export]

One process, one thread. The stage runs `loss(model, batch)` as it does in training; the plain way calls the same blocks
by hand. CPU seconds of the thread, in turn; the difference of the medians is the overhead of one micro-batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from rounds import example, load

import headway
from headway.graph.record import record_run
from headway.run.hold import drop_others
from headway.run.stage import Stage


def cpu_medians(ways: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Give each way's median CPU seconds; they take turns."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 3):
        for way, kept in zip(ways, times, strict=True):
            started = time.thread_time()
            way()
            kept.append(time.thread_time() - started)
    return [statistics.median(kept[3:]) for kept in times]


def overhead(name: str, layers: int, width: int, samples: int, context: int, cut_at: int, rounds: int) -> None:
    """Compare both stages of a GPT that is cut before block `cut_at` with the same calls made by hand."""
    import torch
    import torch.nn.functional as F

    gpt = example("gpt")
    for index in (0, 1):
        torch.manual_seed(0)
        model = gpt.GPT(layers, width, max(1, width // 64), context)
        batch = tuple(torch.randint(256, (2, samples, context)))
        fixed = {"data": 1, "pipeline": 2, "num_micro_batches": samples, "cuts": (f"blocks.{cut_at}",)}
        plan = headway.plan(model, gpt.loss, batch, cluster="2xcpu:64GiB", fixed=fixed)
        assert plan.split is not None
        part = plan.split.stages[index]
        drop_others(model, part.parameters)
        stage = Stage.of(plan.split, index, model, gpt.loss, torch.device("cpu"))
        micro = tuple(leaf[:1] for leaf in batch)
        boundary = torch.randn(1, context, width, requires_grad=True)
        received = {crossing.key: boundary for crossing in part.receives}

        def first(model: Any = model, micro: Any = micro) -> Any:
            x = model.token(micro[0]) + model.position(torch.arange(micro[0].shape[1]))
            for block in model.blocks[:cut_at]:
                x = block(x)
            return x

        def last(model: Any = model, micro: Any = micro, x: Any = boundary) -> Any:
            for block in model.blocks[cut_at:]:
                x = block(x)
            logits = F.linear(model.norm(x), model.token.weight)
            return F.cross_entropy(logits.flatten(0, 1), micro[1].flatten())

        def as_stage(stage: Any = stage, micro: Any = micro, received: Any = received) -> Any:
            return stage.run(micro, received, {})

        ours, plain = cpu_medians([as_stage, (first, last)[index]], rounds)
        held = cut_at if index == 0 else layers - cut_at
        print(
            f"  {name}, stage {index} ({held} of {layers} layers): {ours * 1e3:.2f} ms, plainly {plain * 1e3:.2f} ms, "
            f"overhead {(ours - plain) * 1e3:.2f} ms a micro-batch",
            flush=True,
        )


def recording(export: bool) -> None:
    """Time the recording of a deep GPT on meta beside torch.export of its forward."""
    import torch

    gpt = example("gpt")
    with torch.device("meta"):
        model = gpt.GPT(96, 512, 8, 256)
        batch = (torch.zeros(4, 256, dtype=torch.long), torch.zeros(4, 256, dtype=torch.long))
    started = time.thread_time()
    calls = len(record_run(model, gpt.loss, batch, samples=4).graph.calls)
    ours = time.thread_time() - started
    print(f"  recording 96 layers x 512 on meta, loss included: {ours:.2f} s CPU, {calls} calls", flush=True)
    if export:
        started = time.thread_time()
        torch.export.export(model, (batch[0],))
        theirs = time.thread_time() - started
        print(f"  torch.export of its forward: {theirs:.2f} s CPU; ratio {ours / theirs:.3f}", flush=True)


def main() -> None:
    """Print all of it."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--no-export", action="store_true", help="leave torch.export out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"a stage beside the same calls made by hand, forward of one micro-batch of 1 sample; {load()}")
    overhead("GPT 6 x 64, 16 tokens", 6, 64, 2, 16, 3, options.rounds)
    overhead("GPT 6 x 288, 128 tokens", 6, 288, 2, 128, 3, options.rounds)
    overhead("GPT 96 x 64, 16 tokens", 96, 64, 2, 16, 90, options.rounds)
    recording(not options.no_export)


if __name__ == "__main__":
    main()
