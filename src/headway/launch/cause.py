"""The first cause: of all ranks that ended badly, the one that failed by itself, and the words that say so."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headway.errors import HeadwayError
from headway.journal import Failed, PlanChosen, StepDone, read
from headway.launch.directory import shown
from headway.units import format_bytes

MAX_LINES = 12
_MAX_COLUMNS = 160


@dataclass(frozen=True)
class Ending:
    """How one rank ended: when (seconds since the epoch), its exit status (negative: the signal that ended it).

    `ended` says that the launcher ended it; `failed` is what the rank wrote about its own failure.
    """

    rank: int
    time: float
    status: int
    ended: bool = False
    failed: Failed | None = None

    @property
    def well(self) -> bool:
        """Tell whether it came to its own end, with success."""
        return self.status == 0 and self.failed is None

    @property
    def exit_code(self) -> int:
        """Give the exit code of a shell: the script's own, 1 for an exception, 128 + signal."""
        if self.failed is not None:
            return self.failed.exit_code
        return self.status if self.status >= 0 else 128 - self.status


def with_records(endings: Sequence[Ending], run_directory: Path) -> list[Ending]:
    """Add to each ending what its rank wrote about it: the time and the cause."""
    try:
        entries = read(run_directory)
    except HeadwayError:
        return list(endings)
    failures: dict[int, tuple[float, Failed]] = {}
    for entry in entries:
        if isinstance(entry.event, Failed):
            failures.setdefault(entry.rank, (entry.time, entry.event))
    told = []
    for ending in endings:
        if ending.rank in failures:
            moment, failed = failures[ending.rank]
            ending = replace(ending, time=moment, failed=failed, ended=False)
        told.append(ending)
    return told


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """Choose the earliest ending that is not the consequence of another; None when all went well.

    A rank that only lost a peer counts when no other failed, and then the earliest of them.
    """
    bad = sorted((e for e in endings if not e.well and not e.ended), key=lambda ending: ending.time)
    own = [ending for ending in bad if ending.failed is None or not ending.failed.consequence]
    return next(iter(own or bad), None)


def report(cause: Ending, endings: Sequence[Ending], run_directory: Path, *, hint: str | None = None) -> str:
    """Say what happened in at most twelve lines: when, on which rank, where; the fact; what became of the others."""
    same = [e.rank for e in endings if e.failed is not None and cause.failed is not None and _alike(e, cause)] or [
        cause.rank
    ]
    place = f" ({cause.failed.place})" if cause.failed is not None and cause.failed.place else ""
    head = f"headway: stopped{_when(cause, run_directory)}. First cause, on {_ranks(same)}{place}:"
    tail = [*_others(endings, same), f"Logs: {shown(run_directory)}"]
    # The last sentences share one line, as long as it stays readable.
    tail = [" ".join(tail)] if sum(map(len, tail)) < _MAX_COLUMNS else tail
    text = cause.failed.message if cause.failed is not None else _unrecorded(cause, hint)
    body = text.splitlines() or ["no message"]
    room = MAX_LINES - 1 - len(tail)
    if len(body) > room:  # the remedy, when there is one, is the last line
        body = [*body[: room - 2], "...", body[-1]]
    lines = [head, *("  " + line for line in body), *tail]
    return "\n".join(line if len(line) <= _MAX_COLUMNS else line[: _MAX_COLUMNS - 3] + "..." for line in lines)


def _alike(ending: Ending, cause: Ending) -> bool:
    one, other = ending.failed, cause.failed
    return one is not None and other is not None and (one.kind, one.message) == (other.kind, other.message)


def _unrecorded(cause: Ending, hint: str | None) -> str:
    """Describe an ending that left no record: a signal, os._exit, or a crash below Python."""
    if cause.status < 0:
        try:
            name = signal.Signals(-cause.status).name
        except ValueError:
            name = "an unknown signal"
        text = f"the process was killed by {name} (signal {-cause.status})"
    else:
        text = f"the process ended with exit code {cause.status}, and no exception (os._exit, or a crash below Python)"
    return text + (f"\n{hint}" if hint else "")


def _when(cause: Ending, run_directory: Path) -> str:
    if cause.failed is not None and cause.failed.step is not None:
        return f" at step {cause.failed.step}"
    try:
        events = [entry.event for entry in read(run_directory)]
    except HeadwayError:
        return ""
    steps = [event.step for event in events if isinstance(event, StepDone)]
    if steps:
        return f" after step {max(steps)}"
    return " before the first step" if any(isinstance(event, PlanChosen) for event in events) else ""


def _others(endings: Sequence[Ending], same: Sequence[int]) -> list[str]:
    """Say, in a sentence each, what became of the ranks that are not the cause."""
    rest = [ending for ending in endings if ending.rank not in same]
    waiting = [e for e in rest if e.failed is not None and e.failed.consequence]
    failed = [e for e in rest if not e.well and not e.ended and e not in waiting]
    said = []
    if waiting:
        details = next((e.failed.waiting for e in waiting if e.failed is not None and e.failed.waiting), None)
        # "waiting for an all-reduce, 1.1 s (what the network said)": the network's words are in the log.
        what = "" if details is None else f" ({details.removeprefix('waiting for ').partition(' (')[0]})"
        said.append(f"{_ranks([e.rank for e in waiting], True)} {_were(waiting)} waiting for {_ranks(same)}{what}.")
    if failed:
        said.append(f"{_ranks([e.rank for e in failed], True)} failed too.")
    for chosen, words in (([e for e in rest if e.ended], "ended"), ([e for e in rest if e.well], "done")):
        if chosen:
            said.append(f"{_ranks([e.rank for e in chosen], True)} {_were(chosen)} {words}.")
    return said


def _were(endings: Sequence[Ending]) -> str:
    return "was" if len(endings) == 1 else "were"


def _ranks(ranks: Sequence[int], capital: bool = False) -> str:
    word = "Rank" if capital else "rank"
    if len(ranks) == 1:
        return f"{word} {ranks[0]}"
    shortened = len(ranks) > 12
    listed = ", ".join(map(str, ranks[:12])) + (f", ... ({len(ranks)} ranks)" if shortened else "")
    return f"{word}s {listed}"


def hint_of(cause: Ending, *, memory_kills: bool, device_memory: int | None, log: str) -> str | None:
    """Add what is known about an ending without a record: where the memory went, where the stack is."""
    if cause.status == -signal.SIGKILL:
        if memory_kills:
            return "the machine ran out of memory: the kernel killed it. Try: fewer processes, or --device-memory."
        return "nothing of ours sent it: a scheduler, a person, or the kernel for want of memory (see dmesg)"
    if cause.status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL):
        budget = "" if device_memory is None else f" Its budget was {format_bytes(device_memory)} (--device-memory)."
        return f"where it was is written in {log}.{budget}"
    return None
