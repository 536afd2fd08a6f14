"""The journal: what happened in a run, as typed events, one JSONL file a rank."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

from headway.errors import HeadwayError


class ActionLike(Protocol):
    """An action of a schedule, as far as the journal needs it."""

    @property
    def kind(self) -> Any: ...
    @property
    def stage(self) -> int: ...
    @property
    def micro(self) -> int: ...
    @property
    def peer(self) -> int | None: ...


class SpanLike(Protocol):
    """A span of a timeline, as far as the journal needs it."""

    @property
    def rank(self) -> int: ...
    @property
    def action(self) -> Any: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True)
class SpanSeen:
    """One action on one rank, from `start` to `end` in seconds since the step began."""

    rank: int
    kind: str
    stage: int
    micro: int
    start: float
    end: float
    peer: int | None = None

    @staticmethod
    def of(spans: Iterable[SpanLike]) -> tuple[SpanSeen, ...]:
        """Copy the spans of a timeline into the journal's form."""
        return tuple(
            SpanSeen(s.rank, str(s.action.kind), s.action.stage, s.action.micro, s.start, s.end, s.action.peer)
            for s in spans
        )


@dataclass(frozen=True)
class RunStarted:
    """A run began: which script, under which launcher, on how many processes."""

    script: str
    arguments: tuple[str, ...]
    launcher: str
    size: int
    device_memory: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanChosen:
    """The plan of the run: its text, its TOML, and what it predicts (seconds a step, bytes per rank)."""

    text: str
    toml: str | None = None
    seconds: float | None = None
    memory: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepDone:
    """One optimizer step as it happened on this rank. What is not known is None."""

    step: int
    loss: float | None = None
    seconds: float | None = None
    samples: int | None = None
    tokens: int | None = None
    peak_bytes: int | None = None
    bubble: float | None = None
    grad_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedBesideHappened:
    """Seconds a step and peak bytes of this rank, planned and happened.

    What happened counts from one log to the next; `outside_seconds` of it were not in `forward_backward`.
    """

    step: int
    planned_seconds: float | None
    happened_seconds: float | None
    planned_bytes: int | None
    happened_bytes: int | None
    outside_seconds: float | None = None


@dataclass(frozen=True)
class TimelineSeen:
    """One step's timeline, planned and happened; a rank may write all ranks' spans or its own only."""

    step: int
    planned: tuple[SpanSeen, ...]
    happened: tuple[SpanSeen, ...]


@dataclass(frozen=True)
class Verified:
    """The split was compared with the undivided model (or stage by stage) before training."""

    what: str
    largest_difference: float | None
    passed: bool


@dataclass(frozen=True)
class CodecChecked:
    """A bucket of gradients, or a stretch of it, was also summed exactly: `error` is the codec's, relative to the sum.

    `parameters` are the bucket's; `step` counts this rank's reductions from 1. Above the `limit` (None: there is none)
    the codec gives way to `now`.
    """

    step: int
    codec: str
    parameters: tuple[str, ...]
    error: float
    limit: float | None
    now: str


@dataclass(frozen=True)
class Failed:
    """A rank failed. `message` is shown as it is; `place` is the line of user code.

    `consequence` says that it failed because another rank did; `waiting` is then what it was waiting for.
    """

    kind: str
    message: str
    place: str | None = None
    traceback: str | None = None
    exit_code: int = 1
    consequence: bool = False
    step: int | None = None
    waiting: str | None = None


@dataclass(frozen=True)
class RunEnded:
    """The script came to its end on this rank; `exit_code` 0 says that it succeeded."""

    exit_code: int = 0


Event = (
    RunStarted
    | PlanChosen
    | StepDone
    | PlannedBesideHappened
    | TimelineSeen
    | Verified
    | CodecChecked
    | Failed
    | RunEnded
)

_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class Entry:
    """One line of a journal: when (seconds since the epoch), which rank, what."""

    time: float
    rank: int
    event: Event


class Journal:
    """Append this rank's events to `run_directory`/rankN.jsonl; without a directory nothing is kept.

    The directory is made if there is none. Raises HeadwayError when it cannot be.
    """

    def __init__(self, run_directory: Path | None, rank: int) -> None:
        self.rank = rank
        self.path = None if run_directory is None else Path(run_directory) / f"rank{rank}.jsonl"
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise HeadwayError(
                    f"the run's directory cannot be made: {error.strerror}",
                    place=str(run_directory),
                    remedy="another HEADWAY_RUN_DIRECTORY, where this user may write",
                ) from error

    def write(self, event: Event) -> None:
        """Append one event. One write call a line, so that a killed process leaves whole lines."""
        if self.path is None:
            return
        entry = {"time": time.time(), "rank": self.rank, "event": type(event).__name__} | dataclasses.asdict(event)
        line = json.dumps(entry, default=float, ensure_ascii=False) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode("utf-8", "backslashreplace"))


def read(run_directory: Path | str) -> list[Entry]:
    """Read the events of all ranks, in order of time. Raises HeadwayError when there are none to read."""
    directory = Path(run_directory)
    files = sorted(directory.glob("rank*.jsonl"))
    if not files:
        raise HeadwayError(
            f"no journal in {directory}" if directory.is_dir() else f"no such run: {directory}",
            place="a run keeps its journal in runs/NAME/rank0.jsonl, rank1.jsonl, ...",
            remedy="headway show runs/NAME, with one of the names that `ls runs` gives",
        )
    return sorted((entry for path in files for entry in _read_file(path)), key=lambda entry: entry.time)


def _read_file(path: Path) -> list[Entry]:
    entries = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break  # the process was killed in the middle of its last line
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise HeadwayError(
                f"a line of the journal cannot be read: {error}",
                place=f"{path}:{number}",
                remedy="remove the line, or read it with the version of headway that wrote it",
            ) from error
    return entries


def _entry(raw: dict[str, Any]) -> Entry:
    moment, rank, kind = raw.pop("time"), raw.pop("rank"), _KINDS[raw.pop("event")]
    hints = get_type_hints(kind)
    values = {name: _restore(hints[name], value) for name, value in raw.items()}
    return Entry(moment, rank, kind(**values))


def _restore(hint: Any, value: Any) -> Any:
    """Give JSON's lists back the tuples (and spans) that the event's type names."""
    if hint == tuple[SpanSeen, ...]:
        return tuple(SpanSeen(**span) for span in value)
    return tuple(value) if isinstance(value, list) else value
