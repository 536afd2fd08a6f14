"""A Chrome trace (chrome://tracing, ui.perfetto.dev): one process for planned, one for happened, a thread a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.schedule.action import Kind
from headway.schedule.timeline import Timeline

# A message on its way overlaps what its rank computes; spans of one thread must nest, so messages get their own.
_ON_THE_LINK = frozenset({Kind.SEND, Kind.SEND_GRAD})
_MICROSECONDS = 1e6


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Turn named timelines ({"planned": ..., "happened": ...}) into the JSON object of a Chrome trace."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_named("process_name", process, None, name))
        for rank in range(timeline.num_ranks):
            events.append(_named("thread_name", process, 2 * rank, f"rank {rank}"))
            spans = timeline.of(rank)
            if any(span.action.kind in _ON_THE_LINK for span in spans):
                events.append(_named("thread_name", process, 2 * rank + 1, f"rank {rank}, messages"))
            events += [
                {
                    "ph": "X",
                    "name": str(span.action),
                    "cat": str(span.action.kind),
                    "pid": process,
                    "tid": 2 * rank + (span.action.kind in _ON_THE_LINK),
                    "ts": span.start * _MICROSECONDS,
                    "dur": (span.end - span.start) * _MICROSECONDS,
                    "args": {"stage": span.action.stage, "micro_batch": span.action.micro},
                }
                for span in spans
            ]
        for rank, steps in enumerate(timeline.memory):
            events += [
                {
                    "ph": "C",
                    "name": f"rank {rank} memory",
                    "pid": process,
                    "ts": moment * _MICROSECONDS,
                    "args": {"bytes": size},
                }
                for moment, size in steps
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write the Chrome trace of named timelines to a file."""
    path.write_text(json.dumps(chrome_trace(timelines)))


def _named(what: str, process: int, thread: int | None, name: str) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "name": what, "pid": process, "args": {"name": name}}
    return event if thread is None else event | {"tid": thread}
