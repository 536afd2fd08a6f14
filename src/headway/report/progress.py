"""The progress line: one live line on a terminal, plain lines elsewhere; what is not known is not printed."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from headway.journal import PlannedBesideHappened
from headway.units import format_bytes, format_count, format_seconds

# The third step: the first one warms up caches and is left out of what happened.
COMPARED_AT = 3
WORTH_SAYING = 0.05
"""Part of a step that the script spends by itself (loading, clipping, the optimizer) and that is worth a word."""
_PLAIN_EVERY = 10.0
_LIVE_EVERY = 0.1
# Weight of the newest step in the smoothed seconds a step.
_NEWEST = 0.2


class Progress:
    """Show how training goes on: step, loss, speed, peak memory, bubble, time left. Ranks other than 0 show nothing.

    `planned_seconds` a step and `planned_bytes` at peak are the plan's, for the line after the third step.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        planned_seconds: float | None = None,
        planned_bytes: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shows = rank == 0
        self._planned_seconds = planned_seconds
        self._planned_bytes = planned_bytes
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._live: Any = None
        self._num_steps = 0
        self._early: list[tuple[float, float]] = []
        self._smoothed: float | None = None
        self._last_call: float | None = None
        self._last_shown = -math.inf
        self._waiting: str | None = None
        if self._shows:
            atexit.register(self.close)

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        seconds: float | None = None,
        outside: float = 0.0,
        tokens: int | None = None,
        samples: int | None = None,
        peak_bytes: int | None = None,
        bubble: float | None = None,
        total: int | None = None,
    ) -> PlannedBesideHappened | None:
        """Show one step. `seconds`, `tokens`, `samples` are of this step, over all ranks; `total` counts the steps.

        `outside` of the seconds the script spent by itself.

        After the third call, return what was planned beside what happened (and show it), on every rank.
        """
        now = self._clock()
        self._measure(now)
        compared = self._compare(step, seconds, outside, peak_bytes)
        if self._shows:
            speed = _speed(seconds, tokens, samples)
            left = self._left(step, total)
            text = line(step, loss=loss, speed=speed, peak_bytes=peak_bytes, bubble=bubble, total=total, left=left)
            self._show(text, now, last=total is not None and step + 1 >= total)
            if compared is not None and (said := beside(compared)) is not None:
                self._print(said)
        return compared

    def say(self, text: str) -> None:
        """Print a line of its own on rank 0."""
        if self._shows:
            self._print(text)

    def close(self) -> None:
        """Show the last line if it has not been shown, and leave the terminal as it was. May be called twice."""
        if self._waiting is not None and not self._stream.closed:  # by whom the script had sent its output to
            if self._live is None:
                self._print(self._waiting)
            else:
                self._live.update(self._waiting, refresh=True)
        self._waiting = None
        if self._live is not None:
            self._live.stop()
            self._live = None
        atexit.unregister(self.close)

    def _measure(self, now: float) -> None:
        """Follow the seconds between steps: loading of data counts for the time that is left."""
        if self._last_call is not None:
            between = now - self._last_call
            # The first steps are slower than the rest: they are forgotten faster than the smoothing would.
            weight = max(_NEWEST, 1 / self._num_steps)
            self._smoothed = between if self._smoothed is None else self._smoothed + weight * (between - self._smoothed)
        self._last_call = now
        self._num_steps += 1

    def _compare(
        self, step: int, seconds: float | None, outside: float, peak_bytes: int | None
    ) -> PlannedBesideHappened | None:
        if 1 < self._num_steps <= COMPARED_AT and seconds is not None:
            self._early.append((seconds, outside))
        if self._num_steps != COMPARED_AT:
            return None
        count = len(self._early)
        happened = sum(each for each, _ in self._early) / count if count else None
        apart = sum(each for _, each in self._early) / count if count else None
        return PlannedBesideHappened(step, self._planned_seconds, happened, self._planned_bytes, peak_bytes, apart)

    def _left(self, step: int, total: int | None) -> float | None:
        if total is None or self._smoothed is None:
            return None
        return max(0, total - step - 1) * self._smoothed

    def _show(self, text: str, now: float, *, last: bool) -> None:
        live = self._stream.isatty()
        if not last and now - self._last_shown < (_LIVE_EVERY if live else _PLAIN_EVERY):
            self._waiting = text
            return
        self._last_shown = now
        self._waiting = None
        if not live:
            self._print(text)
            return
        if self._live is None:
            self._live = _live_line(self._stream)
        self._live.update(text, refresh=True)
        if last:
            self.close()

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def line(
    step: int,
    *,
    loss: float | None = None,
    speed: str | None = None,
    peak_bytes: int | None = None,
    bubble: float | None = None,
    total: int | None = None,
    left: float | None = None,
) -> str:
    """Write the progress line; with `total` the steps done are counted from 1."""
    parts = [f"step {step}" if total is None else f"step {step + 1}/{total}"]
    if loss is not None:
        parts.append(f"loss {float(loss):.4g}")
    if speed is not None:
        parts.append(speed)
    if peak_bytes is not None:
        parts.append(f"peak {format_bytes(peak_bytes)}")
    if bubble is not None:
        parts.append(f"bubble {bubble:.0%}")
    if left:
        parts.append(f"{format_seconds(left)} left")
    return "  ".join(parts)


def beside(compared: PlannedBesideHappened) -> str | None:
    """Write the line 'planned beside happened'; None when neither time nor memory is known on both sides."""
    said = []
    if compared.planned_seconds and compared.happened_seconds:
        planned, happened = compared.planned_seconds, compared.happened_seconds
        change = f"{happened / planned - 1:+.0%}"
        if compared.outside_seconds and compared.outside_seconds > WORTH_SAYING * happened:
            change += f"; {format_seconds(compared.outside_seconds)} of it outside forward_backward"
        said.append(f"step {format_seconds(planned)} planned, {format_seconds(happened)} happened ({change})")
    if compared.planned_bytes and compared.happened_bytes:
        room, peak = compared.planned_bytes, compared.happened_bytes
        said.append(f"peak memory {format_bytes(room)} planned, {format_bytes(peak)} happened ({peak / room - 1:+.0%})")
    return f"planned beside happened: {'; '.join(said)}" if said else None


def _speed(seconds: float | None, tokens: int | None, samples: int | None) -> str | None:
    counted, name = (tokens, "tokens") if tokens is not None else (samples, "samples")
    if counted is None or not seconds:
        return None
    return f"{format_count(counted / seconds)} {name}/s"


def _live_line(stream: TextIO) -> Any:
    """Start rich's live display: what the script prints meanwhile appears above the line."""
    from rich.console import Console
    from rich.live import Live

    live = Live(console=Console(file=stream, highlight=False, markup=False), auto_refresh=False)
    live.start()
    return live
