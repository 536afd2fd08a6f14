"""A timeline as text: each rank a row, time from left to right; planned and happened under each other.

rank 0  F0--F1--....B0====F2--B1====....B2====   busy 75 %
rank 1  ....F0--B0====F1--B1====F2--B2====....   busy 82 %
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from headway.journal import SpanSeen
from headway.schedule.action import COMPUTES, Action, Kind
from headway.schedule.timeline import Span, Timeline
from headway.units import format_bytes, format_seconds

IDLE = "."
# A span is its name, then a filler that tells forward from backward where the name does not fit.
_FILL: Mapping[Kind, str] = MappingProxyType({Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: "+", Kind.REDUCE: "r"})
LEGEND = "F forward -, B backward =, I input gradient ~, W weight gradient +, REDUCE r, . idle"


def draw(timeline: Timeline, *, width: int = 100) -> str:
    """Draw one timeline, `width` columns in all; the scale of time stands above it."""
    labels = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    ends = [_busy(timeline, rank, timeline.makespan) for rank in range(timeline.num_ranks)]
    columns = _columns(labels, ends, width)
    rows = [_row(timeline, rank, timeline.makespan, columns) for rank in range(timeline.num_ranks)]
    return "\n".join(_lay_out(labels, rows, ends, timeline.makespan, columns))


def beside(planned: Timeline, happened: Timeline, *, width: int = 100) -> str:
    """Draw what was planned over what happened, rank by rank, on one scale of time."""
    whole = max(planned.makespan, happened.makespan)
    num_ranks = max(planned.num_ranks, happened.num_ranks)
    labels: list[str] = []
    ends: list[str] = []
    for rank in range(num_ranks):
        for name, timeline in (("planned", planned), ("happened", happened)):
            labels.append(f"rank {rank}  planned " if name == "planned" else " " * len(f"rank {rank}  ") + "happened")
            ends.append(_busy(timeline, rank, timeline.makespan))
    columns = _columns(labels, ends, width)
    rows = [_row(timeline, rank, whole, columns) for rank in range(num_ranks) for timeline in (planned, happened)]
    summary = (
        f"planned {format_seconds(planned.makespan)}, bubble {planned.bubble:.0%}; "
        f"happened {format_seconds(happened.makespan)}, bubble {happened.bubble:.0%}"
    )
    return "\n".join([*_lay_out(labels, rows, ends, whole, columns), summary])


def order_of(timeline: Timeline) -> str:
    """Write each rank's actions in order, without the scale of time: what ran after what."""
    several = len({span.action.stage for span in timeline.spans}) > timeline.num_ranks
    rows = []
    for rank in range(timeline.num_ranks):
        names = [_name(span.action, several) for span in timeline.of(rank) if span.action.kind in _FILL]
        rows.append(f"rank {rank}  " + " ".join(names))
    return "\n".join(rows)


def peaks(planned: Timeline, happened: Timeline) -> str:
    """Write the peak bytes of each rank, planned and happened; a side that is not known is left out."""
    rows = []
    for rank in range(max(planned.num_ranks, happened.num_ranks)):
        said = [
            f"{name} {format_bytes(timeline.peak_bytes(rank))}"
            for name, timeline in (("planned", planned), ("happened", happened))
            if rank < len(timeline.memory) and timeline.memory[rank]
        ]
        rows.append(f"rank {rank}  " + ", ".join(said or ["memory not known"]))
    return "\n".join(rows)


def timeline_of(spans: Iterable[SpanSeen], num_ranks: int | None = None) -> Timeline:
    """Give the journal's spans back the form of a Timeline; times stay as they are."""
    found = tuple(Span(s.rank, Action(Kind(s.kind), s.stage, s.micro, s.peer), s.start, s.end) for s in spans)
    counted = 1 + max((span.rank for span in found), default=-1)
    return Timeline(counted if num_ranks is None else max(num_ranks, counted), found)


def for_every_copy(timeline: Timeline, num_ranks: int) -> Timeline:
    """Repeat the timeline of one copy of the model for all of them, so that it stands beside that of `num_ranks` ranks.

    Copies are the innermost axis of the mesh: rank = pipeline rank x copies + copy. Unchanged where that is not whole.
    """
    if timeline.num_ranks == 0 or num_ranks <= timeline.num_ranks or num_ranks % timeline.num_ranks:
        return timeline
    copies = num_ranks // timeline.num_ranks
    spans = tuple(
        Span(span.rank * copies + copy, span.action, span.start, span.end)
        for span in timeline.spans
        for copy in range(copies)
    )
    memory = tuple(steps for steps in timeline.memory for _ in range(copies))
    return Timeline(num_ranks, spans, memory)


def _row(timeline: Timeline, rank: int, whole: float, columns: int) -> str:
    cells = [IDLE] * columns
    if rank >= timeline.num_ranks or whole <= 0:
        return "".join(cells)
    spans = [span for span in timeline.of(rank) if span.action.kind in _FILL]
    several = len({span.action.stage for span in spans if span.action.kind in COMPUTES}) > 1
    for span in spans:
        first = min(int(span.start / whole * columns), columns - 1)
        last = min(max(first + 1, round(span.end / whole * columns)), columns)
        room = last - first
        name = _name(span.action, several)
        # A name cut in the middle of its number would be another micro-batch's: one letter, or nothing, instead.
        text = name if len(name) <= room else str(span.action.kind)[0]
        cells[first:last] = (text + _FILL[span.action.kind] * room)[:room]
    return "".join(cells)


def _name(action: Action, with_stage: bool) -> str:
    stage = f"{action.stage}" if with_stage else ""
    return f"{stage}R" if action.kind is Kind.REDUCE else f"{stage}{action.kind}{action.micro}"


def _busy(timeline: Timeline, rank: int, whole: float) -> str:
    if rank >= timeline.num_ranks or whole <= 0:
        return "nothing"
    return f"busy {timeline.busy(rank) / whole:.0%}"


def _columns(labels: list[str], ends: list[str], width: int) -> int:
    return max(10, width - max(map(len, labels), default=0) - max(map(len, ends), default=0) - 4)


def _lay_out(labels: list[str], rows: list[str], ends: list[str], whole: float, columns: int) -> list[str]:
    left = max(map(len, labels), default=0)
    total = format_seconds(whole)
    lines = [" " * left + "  0" + " " * max(1, columns - 1 - len(total)) + total]
    lines += [f"{label:<{left}}  {row}  {end}" for label, row, end in zip(labels, rows, ends, strict=True)]
    return lines
