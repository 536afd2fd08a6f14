"""A timeline as an SVG picture: a row for each rank, time from left to right; planned and happened under each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from xml.sax.saxutils import escape

from headway.schedule.action import COMPUTES, Action, Kind
from headway.schedule.timeline import Span, Timeline
from headway.units import format_seconds

_DOES: Mapping[Kind, str] = MappingProxyType(
    {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.REDUCE: "reduce"}
)
_MESSAGES = Kind.SEND, Kind.SEND_GRAD
_ROW, _GAP, _LABEL, _END, _LETTER, _HEAD, _AXIS = 22, 10, 132, 76, 6.2, 34, 34
# Filled shapes carry dark letters on light colours in both themes; what is drawn on the page itself takes the theme's.
_STYLE = """
.headway{font:11px ui-sans-serif,system-ui,Helvetica,Arial,sans-serif}
.headway text{fill:#1f2430}.headway .dim{fill:#667085}.headway .lane{fill:#f1f2f5}
.headway .grid{stroke:#d8dce3;stroke-width:1}.headway .name{fill:#16181d;font-size:10px;text-anchor:middle}
.headway .F{fill:#8ab8f0}.headway .B{fill:#86cf9e}.headway .I{fill:#7fd3cf}.headway .W{fill:#f2c46d}
.headway .REDUCE{fill:#c3a6e8}.headway .sent{fill:#7b8494}.headway .later{fill-opacity:.62}
@media (prefers-color-scheme:dark){
.headway text{fill:#e6e8ec}.headway .dim{fill:#9aa3b2}.headway .lane{fill:#232831}.headway .grid{stroke:#3a414d}
.headway .name{fill:#16181d}.headway .later{fill-opacity:.78}
}
"""


def svg(timelines: Mapping[str, Timeline], *, width: int = 1200) -> str:
    """Draw named timelines ({"planned": ..., "happened": ...}) on one scale of time, `width` pixels wide.

    Rank by rank their rows stand under each other. A bar is one action, coloured by what it does, with its micro-batch
    (and its stage before it, "2F0", where ranks hold several); a thin bar below a row is a message on its way. Pointing
    at a bar tells its times. Reads well on light and dark pages; needs no script and no font of its own.
    Raises ValueError when there is no timeline, or less than 400 pixels for it.
    """
    if not timelines or width < 400:
        raise ValueError(f"a picture needs a timeline and 400 pixels, got {len(timelines)} and {width}")
    whole = max(timeline.makespan for timeline in timelines.values())
    num_ranks = max(timeline.num_ranks for timeline in timelines.values())
    scale = (width - _LABEL - _END) / whole if whole > 0 else 0.0
    height = _HEAD + num_ranks * (len(timelines) * _ROW + _GAP) + _AXIS
    said = "; ".join(
        f"{name} {format_seconds(timeline.makespan)}, bubble {timeline.bubble:.0%}"
        for name, timeline in timelines.items()
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="headway" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<title>{escape(said)}</title>",
        f"<style>{_STYLE}</style>",
        *_legend(timelines, said, width),
        *_axis(whole, scale, height),
        *_rows(timelines, num_ranks, scale, width),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write_svg(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write the picture of named timelines to a file."""
    path.write_text(svg(timelines))


def _legend(timelines: Mapping[str, Timeline], said: str, width: int) -> Iterator[str]:
    """Yield the colours of the kinds that there are, and at the right the makespans."""
    found = {span.action.kind for line in timelines.values() for span in line.spans if span.end > span.start}
    x = 8.0
    for kind, text in _DOES.items():
        if kind in found:
            yield f'<rect class="{kind}" x="{x:g}" y="8" width="12" height="12" rx="2"/>'
            label = text if kind is Kind.REDUCE else f"{kind} {text}"
            yield f'<text x="{x + 17:g}" y="18">{label}</text>'
            x += 17 + len(label) * _LETTER + 14
    if found & set(_MESSAGES):
        yield f'<rect class="sent" x="{x:g}" y="13" width="12" height="3"/>'
        yield f'<text x="{x + 17:g}" y="18">message</text>'
    yield f'<text class="dim" x="{width - 8}" y="18" text-anchor="end">{escape(said)}</text>'


def _axis(whole: float, scale: float, height: int) -> Iterator[str]:
    """Yield lines and labels of time at round numbers of seconds."""
    step = _round_step(whole)
    count = int(whole / step + 1e-9) + 1 if step > 0 else 1
    for mark in range(count):
        x = _LABEL + mark * step * scale
        label = format_seconds(mark * step) if mark else "0"
        yield f'<line class="grid" x1="{x:.1f}" y1="{_HEAD - 4}" x2="{x:.1f}" y2="{height - _AXIS + 4}"/>'
        yield f'<text class="dim" x="{x:.1f}" y="{height - _AXIS + 18}" text-anchor="middle">{label}</text>'


def _round_step(whole: float) -> float:
    """Give 1, 2 or 5 times a power of ten, so that five to twelve steps fill the whole."""
    if whole <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(whole / 5))
    return max(power * factor for factor in (1, 2, 5) if power * factor * 5 <= whole * (1 + 1e-9))


def _rows(timelines: Mapping[str, Timeline], num_ranks: int, scale: float, width: int) -> Iterator[str]:
    y = _HEAD
    for rank in range(num_ranks):
        for index, (name, timeline) in enumerate(timelines.items()):
            if not index:
                yield f'<text x="8" y="{y + 15}">rank {rank}</text>'
            yield f'<text class="dim" x="62" y="{y + 15}">{escape(name)}</text>'
            yield f'<rect class="lane" x="{_LABEL}" y="{y + 1}" width="{width - _LABEL - _END}" height="{_ROW - 3}"/>'
            if rank < timeline.num_ranks:
                yield from _bars(timeline, rank, scale, y)
                busy = timeline.busy(rank) / timeline.makespan if timeline.makespan > 0 else 0.0
                yield f'<text class="dim" x="{width - _END + 8}" y="{y + 15}">busy {busy:.0%}</text>'
            y += _ROW
        y += _GAP


def _bars(timeline: Timeline, rank: int, scale: float, y: int) -> Iterator[str]:
    """Yield the bars of one rank; the later of its stages are paler."""
    stages = sorted({span.action.stage for span in timeline.of(rank) if span.action.kind in COMPUTES})
    for span in timeline.of(rank):
        x, length = _LABEL + span.start * scale, (span.end - span.start) * scale
        if span.action.kind in _DOES:
            later = " later" if stages and span.action.stage != stages[0] else ""
            bar = f'x="{x:.1f}" y="{y + 1}" width="{max(length - 0.6, 0.6):.1f}" height="{_ROW - 6}" rx="1.5"'
            yield f'<rect class="{span.action.kind}{later}" {bar}><title>{_tell(span)}</title></rect>'
            name = _fitting(span.action, len(stages) > 1, length)
            if name:
                yield f'<text class="name" x="{x + length / 2:.1f}" y="{y + 13}">{name}</text>'
        elif span.action.kind in _MESSAGES:
            bar = f'x="{x:.1f}" y="{y + _ROW - 5}" width="{max(length, 0.6):.1f}" height="2.5"'
            yield f'<rect class="sent" {bar}><title>{_tell(span)}</title></rect>'


def _fitting(action: Action, several: bool, length: float) -> str:
    """Give the longest name that fits: "2F3", "F3", "3", or none; a number is never cut."""
    if action.kind is Kind.REDUCE:
        names = ["reduce", "R"]
    else:
        names = [f"{action.stage}{action.kind}{action.micro}"] if several else []
        names += [f"{action.kind}{action.micro}", str(action.micro)]
    return next((name for name in names if len(name) * _LETTER + 2 <= length), "")


def _tell(span: Span) -> str:
    start, took = (format_seconds(seconds) if seconds > 0 else "0 s" for seconds in (span.start, span.end - span.start))
    return escape(f"{span.action.describe()}, from {start} for {took}")
