"""Times schedules over stages that sleep instead of computing: step time over what the simulator says of the schedule.

    python benchmarks/sleeping_stages.py [--rounds 5] [--boundary-kib 64] [--ranks 2 4]

A forward sleeps 10 ms, input and weight gradients 10 ms each, so all above the makespan is the runtime's own: messages,
Python, waiting. This machine's sleeps last longer than asked; that is measured first, and so much less is asked for. A
stage's weight is small: what it computes takes no time beside its sleep. torch's schedules take turns with ours on the
same stages, where torch has the same schedule. "by hand" is the least that can be had: the same order walked by forty
lines that know all shapes, without splitting a model, errors, losses of all ranks or timelines. 2 ranks do 8
micro-batches, 4 ranks 16. "reckoned" is the makespan with what a plan adds before anything has run: for each forward
what following the model's Python costs (planner/price.py), and the seconds of messages over the link as measured.
"predicted" is simulated with the seconds that a stage's actions were seen to take in two steps before.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rounds import Step, alternate, load, on_ranks

UNIT = 0.010
WIDTH = 16
CHUNKED = ("interleaved", "breadth_first", "zero_bubble_v", "dual_pipe_v")
TORCH = {
    "gpipe": "ScheduleGPipe", "one_f_one_b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble_v": "ScheduleZBVZeroBubble", "dual_pipe_v": "ScheduleDualPipeV",
}  # fmt: skip
BY_HAND = ("gpipe", "one_f_one_b", "interleaved", "breadth_first")
SCHEDULES = ("gpipe", "one_f_one_b", "backward_first", "zero_bubble", "zero_bubble_h2", *CHUNKED)


@lru_cache
def oversleep() -> float:
    """Measure how much longer than asked this process sleeps, in seconds."""
    late = []
    for _ in range(30):
        start = time.perf_counter()
        time.sleep(UNIT)
        late.append(time.perf_counter() - start - UNIT)
    return statistics.median(late)


def nap(units: int) -> None:
    """Sleep so many units."""
    time.sleep(units * UNIT - oversleep())


def sleeper(num_stages: int, *, weights_apart: bool, weights_sleep: bool) -> tuple[Any, Any]:
    """Make a model of blocks that sleep, and its loss; a sample is one boundary, [rows, WIDTH] float32.

    `weights_apart`: something else sleeps for the weight's gradient. `weights_sleep`: autograd does, on its way.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            nap(1)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            nap(1 if weights_apart or weights_sleep else 2)
            return grad

    class Weight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Any) -> Any:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            nap(1)
            return grad

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x: Any) -> Any:
            return Sleep.apply(F.linear(x, Weight.apply(self.weight) if weights_sleep else self.weight))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(num_stages))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    def loss(model: Any, batch: Any) -> Any:
        return model(batch).mean()

    return Model(), loss


def measured(steps: list[Any], num_stages: int, message: dict[Any, float]) -> Any:
    """Give the costs that were seen in timelines of steps: medians of each stage's computations, and sends as gaps."""
    from headway.schedule.action import COMPUTES, Kind
    from headway.schedule.costs import Costs

    spans = [span for timeline in steps for span in timeline.spans]
    seen = collections.defaultdict(list)
    for span in spans:
        seen[(span.action.kind, span.action.stage)].append(span.end - span.start)

    def of(kind: Any) -> Any:
        found = [seen[(kind, stage)] for stage in range(num_stages)]
        return tuple(map(statistics.median, found)) if all(found) else None

    sends = sum(span.end - span.start for span in spans if span.action.kind in (Kind.SEND, Kind.SEND_GRAD))
    computations = sum(span.action.kind in COMPUTES for span in spans)
    return Costs(
        forward=of(Kind.F), backward=of(Kind.B) or (), input=of(Kind.I), weight=of(Kind.W), message=message,
        gap=sends / computations,
    )  # fmt: skip


def ours(world: Any, name: str, batch: Any) -> tuple[Step, float, float, Callable[[], float]]:
    """Give our step, the makespan of its order, and what is reckoned and predicted of it, in seconds."""
    import headway
    from headway.collective.probe import measure_link
    from headway.planner.price import STAGE_SECONDS
    from headway.run import apart
    from headway.run.parallel import ParallelModel
    from headway.schedule.costs import Costs
    from headway.schedule.simulate import simulate

    chunks = 2 if name in CHUNKED else 1
    stages, micros = world.size * chunks, len(batch)
    splits = "zero" in name or "dual" in name
    model, loss = sleeper(stages, weights_apart=splits, weights_sleep=False)
    fixed = {
        "pipeline": world.size, "chunks": chunks, "num_micro_batches": micros, "schedule": name,
        "cuts": tuple(f"blocks.{stage}" for stage in range(1, stages)),
    }  # fmt: skip
    cluster = f"{world.size}xcpu:8GiB"
    plan = headway.plan(model, loss, batch, cluster=cluster, fixed=fixed, verify=False)  # type: ignore[arg-type]
    parallel = ParallelModel(model, loss, plan, world)
    if splits and apart.LINEAR.of_weight.__name__ != "slow":
        plain = apart.LINEAR.of_weight

        def slow(*args: Any) -> Any:
            nap(1)
            return plain(*args)

        apart.LINEAR = dataclasses.replace(apart.LINEAR, of_weight=slow)  # type: ignore[misc]
    link = measure_link(world, (0, 1))
    size = batch[0].numel() * 4
    seconds = link[0] + size / link[1]
    costs = Costs(
        forward=(UNIT + STAGE_SECONDS,) * stages, backward=(2 * UNIT,) * stages,
        message={edge: seconds for s, t in plan.lowered.edges or () for edge in ((s, t), (t, s))},
    )  # fmt: skip
    ideal = simulate(plan.order_for(micros), Costs((UNIT,) * stages, (2 * UNIT,) * stages)).makespan

    def predict() -> float:
        timelines = []
        for _ in range(4):
            parallel.forward_backward(batch)
            timelines.append(parallel.timeline)
        seen = measured(timelines[2:], stages, costs.message)  # type: ignore[arg-type]
        if seen.backward == ():  # a backward that is split everywhere
            seen = dataclasses.replace(seen, backward=costs.backward)
        return float(simulate(plan.lowered, seen).makespan)

    return lambda: parallel.forward_backward(batch), ideal, simulate(plan.lowered, costs).makespan, predict


def theirs(world: Any, name: str, batch: Any) -> Step:
    """Give torch's step on the same stages."""
    import torch
    from torch.distributed import pipelining

    chunks, rank, micros = (2 if name in CHUNKED else 1), world.rank, len(batch)
    count = world.size * chunks
    model, _ = sleeper(count, weights_apart=False, weights_sleep=True)
    vee = name in ("zero_bubble_v", "dual_pipe_v")
    mine = (rank, count - 1 - rank) if vee else tuple(range(rank, count, world.size))
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(model.blocks[index], index, count, device) for index in mine]
    kind = getattr(pipelining.schedules, TORCH[name])
    given: Any = stages if name in CHUNKED else stages[0]
    schedule = kind(given, micros, loss_fn=lambda y, _: y.mean())
    inputs, targets = ((batch,) if 0 in mine else ()), ({"target": batch} if count - 1 in mine else {})
    return lambda: schedule.step(*inputs, **targets)


def by_hand(world: Any, name: str, batch: Any) -> Step:
    """Give the same order of the same stages, walked with torch alone."""
    import torch
    import torch.distributed as dist

    from headway.schedule.action import Kind
    from headway.schedule.build import gpipe, one_f_one_b
    from headway.schedule.chunks import breadth_first, interleaved

    chunks, micros, rank = (2 if name in CHUNKED else 1), len(batch), world.rank
    count = world.size * chunks
    make: Any = {f.__name__: f for f in (gpipe, one_f_one_b, interleaved, breadth_first)}[name]  # type: ignore[attr-defined]
    model, _ = sleeper(count, weights_apart=False, weights_sleep=False)
    order = make(count, micros)
    place = {action.stage: number for number, actions in enumerate(order.ranks) for action in actions}
    samples = batch.split(1)

    def tag(kind: Kind, stage: int, micro: int) -> int:
        return ((kind is Kind.B) * count + stage) * micros + micro

    def step() -> None:
        made: dict[Any, Any] = {}
        taken: dict[Any, Any] = {}
        sent, awaited = [], {}
        for action in order.ranks[rank]:  # every shape is known, so all is posted at once
            source = action.stage - 1 if action.kind is Kind.F else action.stage + 1
            if place.get(source, rank) != rank:
                buffer, key = torch.empty_like(samples[0]), tag(action.kind, action.stage, action.micro)
                awaited[key] = (buffer, dist.irecv(buffer, place[source], tag=key))
        for action in order.ranks[rank]:
            stage, micro = action.stage, action.micro
            buffer, work = awaited.get(tag(action.kind, stage, micro), (None, None))
            if work is not None:
                work.wait()
            if action.kind is Kind.F:
                given = buffer if stage else samples[micro]
                if stage and buffer is None:
                    given = made[(stage - 1, micro)].detach()
                taken[(stage, micro)] = given.requires_grad_(stage > 0)
                result = made[(stage, micro)] = model.blocks[stage](given)
                if stage == count - 1:
                    made[(stage, micro)] = result.mean() / micros
                elif place[stage + 1] != rank:
                    key = tag(Kind.F, stage + 1, micro)
                    sent.append(dist.isend(result.detach(), place[stage + 1], tag=key))
            else:
                if stage < count - 1 and buffer is None:
                    buffer = taken.pop((stage + 1, micro)).grad
                made.pop((stage, micro)).backward(buffer)
                if stage and place[stage - 1] != rank:
                    key = tag(Kind.B, stage - 1, micro)
                    sent.append(dist.isend(taken.pop((stage, micro)).grad, place[stage - 1], tag=key))
        for work in sent:
            work.wait()

    return step


def compare(world: Any, options: argparse.Namespace) -> None:
    """Time each schedule, ours and torch's in turn."""
    import torch

    errors: dict[str, list[float]] = {"reckoned": [], "predicted": []}
    for name in SCHEDULES:
        torch.manual_seed(0)
        batch = torch.randn(8 if world.size == 2 else 16, options.boundary_kib * 256 // WIDTH, WIDTH)
        step, ideal, reckoned, predict = ours(world, name, batch)
        predicted = predict()
        other = theirs(world, name, batch) if name in TORCH and not options.alone else step
        ratio = alternate(world, step, other, rounds=options.rounds)
        happened = statistics.median(ratio.ours.wall)
        for kind, seconds in (("reckoned", reckoned), ("predicted", predicted)):
            errors[kind].append(abs(seconds / happened - 1))
        least = None
        if name in BY_HAND and not options.alone:
            hand = alternate(world, step, by_hand(world, name, batch), rounds=options.rounds)
            least = statistics.median(hand.theirs.wall)
        if world.rank == 0:
            torch_text = "" if least is None else f"; by hand {least / ideal:.3f}"
            if other is not step:
                torch_text += f"; torch {statistics.median(ratio.theirs.wall) / ideal:.3f}"
            print(
                f"  {name:<15} makespan {ideal * 1e3:5.0f} ms, happened {happened * 1e3:6.1f}: {happened / ideal:.3f} "
                f"of it (fastest {min(ratio.ours.wall) / ideal:.3f}); reckoned {reckoned / happened - 1:+.1%}, "
                f"predicted {predicted / happened - 1:+.1%}{torch_text}",
                flush=True,
            )
    if world.rank == 0:
        means = ", ".join(f"{kind} {statistics.mean(found):.1%}" for kind, found in errors.items())
        print(f"  mean error: {means}", flush=True)


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--boundary-kib", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--alone", action="store_true", help="without torch's schedules")
    options = parser.parse_args()
    for ranks in options.ranks:
        print(f"{ranks} ranks, stages that sleep, {options.boundary_kib} KiB boundaries; {load()}", flush=True)
        on_ranks(ranks, compare, options)


if __name__ == "__main__":
    main()
