"""A run as text: what was planned, what happened beside it, the loss, the timelines, and why it failed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from headway.errors import HeadwayError
from headway.journal import (
    Entry,
    Failed,
    PlanChosen,
    PlannedBesideHappened,
    RunEnded,
    RunStarted,
    SpanSeen,
    StepDone,
    TimelineSeen,
    Verified,
    read,
)
from headway.report import progress
from headway.report.timeline import LEGEND, beside, draw, for_every_copy, order_of, timeline_of
from headway.schedule.timeline import Timeline
from headway.units import format_bytes, format_count, format_seconds

T = TypeVar("T")


def show_run(run_directory: Path | str, *, width: int = 100) -> str:
    """Write what a run's journals say, in `width` columns. Raises HeadwayError when there is no such run."""
    directory = Path(run_directory)
    entries = read(directory)
    parts = [
        _head(directory, entries),
        _plan(entries),
        _beside(entries),
        _steps(entries),
        _memory(entries),
        _timelines(entries, width),
        _failures(entries),
    ]
    return "\n\n".join(part for part in parts if part)


def timelines_of(run_directory: Path | str) -> Mapping[str, Timeline]:
    """Give the last timelines that a run's ranks wrote, by name: "planned" and "happened", those there are.

    Raises HeadwayError when no step's timeline was written.
    """
    found = _last_timelines(read(run_directory))
    if found is None:
        raise HeadwayError(
            "this run kept no timeline",
            place=str(run_directory),
            remedy="a run writes one when ParallelModel.log is called after a step",
        )
    _, planned, happened = found
    named = {"planned": planned, "happened": happened}
    return {name: timeline for name, timeline in named.items() if timeline.spans}


def _events(entries: Sequence[Entry], kind: type[T], rank: int | None = None) -> list[T]:
    return [e.event for e in entries if isinstance(e.event, kind) and (rank is None or e.rank == rank)]


def _head(directory: Path, entries: Sequence[Entry]) -> str:
    started = _events(entries, RunStarted)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entries[0].time))
    lasted = format_seconds(entries[-1].time - entries[0].time)
    failed, ended = _events(entries, Failed), _events(entries, RunEnded)
    # A process that was killed writes nothing: an end that nobody wrote down is not called a success.
    ranks = {entry.rank for entry in entries}
    state = "failed" if failed else "done" if len(ended) >= len(ranks) else "not ended, or killed"
    lines = [f"run {directory}: {state}; began {moment}, last heard of {lasted} later"]
    if started:
        run = started[0]
        processes = "1 process" if run.size == 1 else f"{run.size} processes"
        limit = "" if run.device_memory is None else f", {format_bytes(run.device_memory)} each"
        lines.append(f"{' '.join((run.script, *run.arguments))}  ({processes}{limit}, launcher: {run.launcher})")
    for verified in _events(entries, Verified):
        difference = verified.largest_difference
        outcome = f": {'equal' if verified.passed else 'NOT equal'}, largest difference"
        lines.append(verified.what if difference is None else f"verified: {verified.what}{outcome} {difference:.1e}")
    return "\n".join(lines)


def _plan(entries: Sequence[Entry]) -> str:
    plans = _events(entries, PlanChosen)
    return plans[0].text if plans else ""


def _beside(entries: Sequence[Entry]) -> str:
    compared = _events(entries, PlannedBesideHappened, rank=0)
    return (progress.beside(compared[-1]) or "") if compared else ""


def _steps(entries: Sequence[Entry]) -> str:
    steps = _events(entries, StepDone, rank=0)
    if not steps:
        return "no step was logged"
    lines = [f"steps {steps[0].step} to {steps[-1].step}"]
    losses = [step for step in steps if step.loss is not None]
    if losses:
        first, last = losses[0], losses[-1]
        best = min(losses, key=lambda step: step.loss if step.loss is not None else 0.0)
        lines[0] += f": loss {first.loss:.4g} -> {last.loss:.4g} (lowest {best.loss:.4g} at step {best.step})"
    timed = [step for step in steps[1:] if step.seconds] or [step for step in steps if step.seconds]
    if timed:
        seconds = statistics.median(step.seconds or 0.0 for step in timed)
        text = f"step time {format_seconds(seconds)} (median)"
        for name in ("tokens", "samples"):
            counts = [getattr(step, name) for step in timed if getattr(step, name) is not None]
            if counts:
                text += f", {format_count(statistics.median(counts) / seconds)} {name}/s"
        bubbles = [step.bubble for step in timed if step.bubble is not None]
        lines.append(text + (f", bubble {statistics.median(bubbles):.0%}" if bubbles else ""))
    for name, value in steps[-1].metrics.items():
        before = steps[0].metrics.get(name)
        lines.append(f"{name} {'' if before is None else f'{before:.4g} -> '}{value:.4g}")
    return "\n".join(lines)


def _memory(entries: Sequence[Entry]) -> str:
    """Give each rank's peak memory, planned beside happened."""
    plans = _events(entries, PlanChosen)
    planned = plans[0].memory if plans else ()
    ranks = sorted({entry.rank for entry in entries} | set(range(len(planned))))
    rows = []
    for rank in ranks:
        peaks = [step.peak_bytes for step in _events(entries, StepDone, rank) if step.peak_bytes is not None]
        said = [f"planned {format_bytes(planned[rank])}"] if rank < len(planned) else []
        said += [f"happened {format_bytes(max(peaks))}"] if peaks else []
        if said:
            rows.append(f"rank {rank}  {', '.join(said)}")
    return "\n".join(["peak memory", *rows]) if rows else ""


def _last_timelines(entries: Sequence[Entry]) -> tuple[int, Timeline, Timeline] | None:
    """Join what the ranks wrote of the last step of which there is a timeline: each all spans, or its own only."""
    seen = _events(entries, TimelineSeen)
    if not seen:
        return None
    last = max(event.step for event in seen)
    planned: dict[SpanSeen, None] = {}
    happened: dict[SpanSeen, None] = {}
    for event in seen:
        if event.step == last:
            planned |= dict.fromkeys(event.planned)
            happened |= dict.fromkeys(event.happened)
    done = timeline_of(happened)
    return last, for_every_copy(timeline_of(planned), done.num_ranks), done


def _timelines(entries: Sequence[Entry], width: int) -> str:
    found = _last_timelines(entries)
    if found is None:
        return ""
    step, planned, happened = found
    if planned.spans and happened.spans:
        drawn = beside(planned, happened, width=width)
        # The order is one line when it was kept: the plan's.
        kept = order_of(planned) == order_of(happened)
        order = "" if kept else f"\norder planned\n{order_of(planned)}\norder happened\n{order_of(happened)}"
        return f"step {step}, planned and happened ({LEGEND})\n{drawn}{order}"
    name, timeline = ("planned", planned) if planned.spans else ("happened", happened)
    return f"step {step}, {name} ({LEGEND})\n{draw(timeline, width=width)}" if timeline.spans else ""


def _failures(entries: Sequence[Entry]) -> str:
    """List the failures, first causes before consequences; the whole stack of the first one."""
    failed = [(entry.rank, entry.event) for entry in entries if isinstance(entry.event, Failed)]
    failed.sort(key=lambda pair: pair[1].consequence)
    lines = []
    for rank, event in failed:
        place = f" ({event.place})" if event.place else ""
        kind = "failed, because another rank did" if event.consequence else "failed"
        lines.append(f"rank {rank} {kind}{place}:")
        lines += ["  " + line for line in event.message.splitlines()]
    if failed and failed[0][1].traceback:
        lines += ["", failed[0][1].traceback.rstrip()]
    return "\n".join(lines)
