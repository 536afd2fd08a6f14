"""Times schedules over stages that sleep instead of computing: step time over the makespan of the schedule's own order.

    python benchmarks/sleeping_stages.py [--rounds 12] [--micros 8] [--boundary-kib 64]

A forward sleeps 10 ms, a backward 20 ms, so all above the makespan is the runtime's own: messages, Python, waiting.
torch's Schedule1F1B and ScheduleGPipe take turns with ours on the same stages, two gloo ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from rounds import alternate, load, on_ranks

FORWARD, BACKWARD = 0.010, 0.020


def sleeper(boundary_kib: int) -> tuple[Any, Any]:
    """Make a model of two blocks that sleep, and its loss; a sample is one boundary."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            time.sleep(FORWARD)
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(BACKWARD)
            return grad * ctx.saved_tensors[0], grad.sum(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(boundary_kib * 256))

        def forward(self, x: Any) -> Any:
            return Sleep.apply(x, self.weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    def loss(model: Any, batch: Any) -> Any:
        return model(batch).mean()

    return Model(), loss


def compare(world: Any, options: argparse.Namespace) -> None:
    """Time each schedule, ours and torch's in turn."""
    import torch
    from torch.distributed import pipelining

    import headway
    from headway.run.parallel import ParallelModel
    from headway.schedule.catalogue import build
    from headway.schedule.costs import Costs
    from headway.schedule.simulate import simulate

    for name, torch_name in (("one_f_one_b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")):
        torch.manual_seed(0)
        model, loss = sleeper(options.boundary_kib)
        theirs_model, _ = sleeper(options.boundary_kib)
        batch = torch.randn(options.micros, options.boundary_kib * 256)
        fixed = {"pipeline": 2, "num_micro_batches": options.micros, "schedule": name, "cuts": ("blocks.1",)}
        plan = headway.plan(model, loss, batch, cluster="2xcpu:8GiB", fixed=fixed)
        parallel = ParallelModel(model, loss, plan, world)
        stage = pipelining.PipelineStage(theirs_model.blocks[world.rank], world.rank, 2, torch.device("cpu"))
        schedule = getattr(pipelining, torch_name)(stage, options.micros, loss_fn=lambda y, _: y.mean())
        costs = Costs(forward=(FORWARD,) * 2, backward=(BACKWARD,) * 2)
        ideal = simulate(build(name, 2, options.micros), costs).makespan

        def theirs(schedule: Any = schedule, batch: Any = batch) -> None:
            schedule.step(batch) if world.rank == 0 else schedule.step(target=batch)

        def ours(parallel: Any = parallel, batch: Any = batch) -> None:
            parallel.forward_backward(batch)

        ratio = alternate(world, ours, theirs, rounds=options.rounds)
        if world.rank == 0:
            for who, times in (("Headway", ratio.ours.wall), (torch_name, ratio.theirs.wall)):
                low, middle, high = (q / ideal for q in statistics.quantiles(times, n=4))
                print(
                    f"  {name:<12} {who:<14} {statistics.median(times) * 1e3:6.1f} ms, makespan {ideal * 1e3:.0f} ms: "
                    f"{middle:.3f} of it (quartiles {low:.3f} to {high:.3f}, fastest {min(times) / ideal:.3f})",
                    flush=True,
                )


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--boundary-kib", type=int, default=64)
    options = parser.parse_args()
    print(f"2 stages that sleep, {options.micros} micro-batches, {options.boundary_kib} KiB boundaries; {load()}")
    on_ranks(2, compare, options)


if __name__ == "__main__":
    main()
