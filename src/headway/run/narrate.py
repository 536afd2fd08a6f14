"""Narrate: what a run says while it trains, on the terminal of rank 0 and in each rank's journal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.collective.world import World
from headway.journal import CodecChecked, Journal, PlanChosen, SpanSeen, StepDone, TimelineSeen
from headway.launch.otherwise import keep_ends
from headway.planner.plan import Plan
from headway.report.progress import Progress
from headway.run.exchange import Told
from headway.run.microbatch import Share


@dataclass
class Narrator:
    """Keeps what the last step came to, until the script logs it."""

    plan: Plan
    world: World
    journal: Journal
    progress: Progress
    batches: int | None = None  # of the pass over a loader that goes on
    first: int | None = None  # the step that was logged first in that pass
    told: Told | None = None
    share: Share | None = None
    tokens: int | None = None
    norm: Any = None
    last: float = field(default_factory=time.perf_counter)
    began: float = 0.0  # when this forward_backward did
    inside: float = 0.0  # seconds of forward_backward since the last log

    @staticmethod
    def start(plan: Plan, world: World, run_directory: Path | None) -> Narrator:
        """Begin to narrate; the plan goes into the journal."""
        journal = Journal(run_directory, world.rank)
        if run_directory is not None and world.launcher != "headway":
            keep_ends(journal, world.launcher, world.size)
        if world.rank == 0:
            toml = None
            if run_directory is not None:
                plan.save(run_directory / "plan.toml")
                toml = (run_directory / "plan.toml").read_text()
            journal.write(PlanChosen(str(plan), toml, plan.seconds, plan.memory))
        most = max(plan.memory, default=None)
        progress = Progress(rank=world.rank, planned_seconds=plan.seconds, planned_bytes=most)
        return Narrator(plan, world, journal, progress)

    def expect(self, batches: int | None) -> None:
        """Say how many batches the pass over a loader has that begins now; one pass may follow another."""
        self.batches, self.first = batches, None
        self.last, self.inside = time.perf_counter(), 0.0

    def begin(self) -> None:
        """Say that a step's forward and backward begin."""
        self.began = time.perf_counter()

    def end(self, told: Told, share: Share, tokens: int | None) -> None:
        """Say that they have ended."""
        self.note(told, share, tokens)
        self.inside += time.perf_counter() - self.began

    def note(self, told: Told, share: Share, tokens: int | None) -> None:
        """Keep what a step came to; `tokens` of the global batch where they are known."""
        self.told, self.share, self.tokens = told, share, tokens

    def tell_checked(self, event: CodecChecked) -> None:
        """Keep what a codec was found to do to gradients; say aloud when it gives way."""
        self.journal.write(event)
        if event.now != event.codec:
            self.progress.say(
                f"codec    {event.codec} gives way to {event.now} after step {event.step}: it changed the sum for "
                f"{event.parameters[0]}, ... by {event.error:.2g} of its size, and {event.limit:g} is allowed"
            )

    def note_norm(self, norm: Any) -> None:
        """Keep a gradient norm."""
        self.norm = norm

    def _end_of_pass(self, step: int) -> int | None:
        """Give the step at which the pass over the loader ends, whatever number it began with."""
        if self.first is None:
            self.first = step
        return None if self.batches is None or step >= self.first + self.batches else self.first + self.batches

    def log(self, step: int, loss: Any, tokens: int | None, total: int | None, metrics: Mapping[str, Any]) -> None:
        """Report a step: what it came to when it trained, whatever was evaluated since, and `metrics`."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        outside, self.inside = seconds - self.inside, 0.0
        told, rank = self.told, self.world.rank
        value = None if loss is None else float(loss)
        bubble = told.timeline.bubble if told and told.timeline else None
        peak = told.peaks[rank] if told else None
        most = max((p for p in told.peaks if p is not None), default=None) if told else None
        samples = self.share.total if self.share else None
        tokens = self.tokens if tokens is None else tokens
        norm = None if self.norm is None else float(self.norm)
        numbers = {name: float(value) for name, value in {**(told.metrics if told else {}), **metrics}.items()}
        self.journal.write(StepDone(step, value, seconds, samples, tokens, peak, bubble, norm, numbers))
        compared = self.progress.step(
            step, loss=value, seconds=seconds, outside=outside, tokens=tokens, samples=samples, peak_bytes=most,
            bubble=bubble, total=total or self._end_of_pass(step),
        )  # fmt: skip
        if compared is not None:
            planned = self.plan.memory[rank] if rank < len(self.plan.memory) else None
            self.journal.write(replace(compared, planned_bytes=planned, happened_bytes=peak))
            if told and told.timeline and rank == 0:
                before = () if self.plan.timeline is None else SpanSeen.of(self.plan.timeline.spans)
                self.journal.write(TimelineSeen(step, before, SpanSeen.of(told.timeline.spans)))
