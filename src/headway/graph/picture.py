"""Picture: a recorded program in a dozen or two lines: what it is made of, and where and why it can be cut or not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.graph.chance import DRAWN_BY_SAMPLE
from headway.graph.model import Call, Cut, ModelGraph
from headway.graph.repeat import Block, repeated_blocks
from headway.graph.rows import drawn
from headway.units import format_bytes, format_count, format_flops

LARGE = 0.2
"""Share of parameters or FLOPs from which a part that cannot be cut is worth a line."""

MOST_LINES = 6
"""Blocks, reasons and parts that are listed each; of the rest the number is told."""


@dataclass(frozen=True)
class Part:
    """Calls that stay together: no stage may begin between them."""

    name: str
    first: int  # its first call
    last: int  # after its last call
    parameters: float  # share of the bytes of all parameters
    flops: float  # share of the program's FLOPs
    where: str  # "model.py:41"

    @property
    def share(self) -> float:
        """The larger share."""
        return max(self.parameters, self.flops)

    @property
    def shares(self) -> str:
        """Write "60% of parameters, 80% of FLOPs"."""
        return f"{self.parameters:.0%} of parameters, {self.flops:.0%} of FLOPs"

    @property
    def line(self) -> str:
        """Write "lstm (LSTM), 1 call: 60% of parameters, 80% of FLOPs"."""
        return f"{self.name}, {plural(self.last - self.first, 'call')}: {self.shares}"


def draw(graph: ModelGraph) -> str:
    """Describe a graph; what `print(graph)` shows."""
    lines = [("program", _program(graph)), ("parameters", _parameters(graph)), ("forward", _forward(graph))]
    lines += _block("blocks", [_repeated(graph, block) for block in repeated_blocks(graph)], "no repeated blocks")
    reads = [call for call in graph.calls if call.reads_value]
    lines.append(("reads", _reads(graph, reads)))
    lines.append(("random", _random(graph)))
    lines += [("buffers", text) for text in changing_buffers(graph)[:1]]
    lines.append(("cuts", cuts_text(graph)))
    lines += _block("refused", [text for text, _ in refusals(graph)])
    lines += _block("together", [part.line for part in large_parts(graph)])
    lines += _block("notes", graph.notes)
    return "\n".join(f"{label:<10} {text}" for label, text in lines)


def parts(graph: ModelGraph) -> tuple[Part, ...]:
    """List what lies between neighbouring allowed cuts, in program order. A shared parameter counts in each part."""
    bounds = [0, *(cut.index for cut in graph.cuts), len(graph.calls)]
    flops, total = max(graph.flops, 1), max(graph.parameter_bytes, 1)
    found = []
    for first, last in zip(bounds, bounds[1:], strict=False):
        # What depends on the batch alone is computed by every stage, and held by none.
        calls = [call for call in graph.calls[first:last] if call.derived] or list(graph.calls[first:last])
        if calls:
            held = {graph.parameter[name] for call in calls for name in call.parameters}
            size = sum(info.bytes for info in held if not info.is_buffer)
            begin, end = calls[0].index, calls[-1].index + 1
            work = sum(call.flops for call in graph.calls[first:last])
            found.append(Part(_named(graph, calls), begin, end, size / total, work / flops, calls[0].where))
    return tuple(found)


def large_parts(graph: ModelGraph) -> list[Part]:
    """List the parts that hold much of the parameters or of the work, the largest first."""
    return sorted((part for part in parts(graph) if part.share >= LARGE), key=lambda part: -part.share)


def cuts_text(graph: ModelGraph) -> str:
    """Say where a stage may begin, and the smallest and the biggest boundary."""
    places = len(graph.cuts) + len(graph.refused_cuts)
    if not graph.cuts:
        return f"none of {plural(places, 'place')} allowed" if places else "none: there is only one call to compute"
    small, big = min(graph.cuts, key=lambda cut: cut.bytes), max(graph.cuts, key=lambda cut: cut.bytes)
    crossing = boundary_text(small) if small.bytes == big.bytes else f"{boundary_text(small)} to {boundary_text(big)}"
    return f"{len(graph.cuts)} of {plural(places, 'place')}; crossing: {crossing}"


def boundary_text(cut: Cut) -> str:
    """Write "3 MiB in 2 tensors (blocks.2)"."""
    return f"{format_bytes(cut.bytes)} in {plural(len(cut.boundary), 'tensor')} ({cut.name})"


def refusals(graph: ModelGraph) -> list[tuple[str, str]]:
    """Group the refused places by reason, most frequent first: what is said of them, and the line of the first."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for index, reason in graph.refused_cuts:
        # Reasons name the module or buffer that is concerned: one line for all of them.
        match = re.match(r"(buffer )?(\S+)(?= changes)", reason)
        kind = reason if match is None else reason.replace(match[0], "a buffer" if match[1] else "a module", 1)
        groups.setdefault(kind, []).append(("" if match is None else match[2], index))
    result = []
    for kind, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = [name for name in dict.fromkeys(name for name, _ in found) if name]
        who = f" ({few(names, 2)})" if names else ""
        result.append((f"{plural(len(found), 'place')}: {kind}{who}", graph.calls[found[0][1]].where))
    return result


def by_place(calls: Iterable[Call]) -> dict[tuple[str, str], list[Call]]:
    """Group calls by function and line of the user's code, in program order."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.where, short(call)), []).append(call)
    return groups


def by_micro_batch(graph: ModelGraph) -> list[Call]:
    """List the draws whose numbers depend on how samples are put together: neither by sample nor one for all."""
    alone = {"all": None, "sample": DRAWN_BY_SAMPLE, "batch": ()}
    kinds = {call.index: alone[rows.whose] for call, rows in drawn(graph)}
    found = ((call, kinds.get(call.index, ())) for call in graph.calls if call.random)
    return [call for call, functions in found if functions is not None and short(call) not in functions]


def changing_buffers(graph: ModelGraph) -> list[str]:
    """Name the buffers that the program changes, by the line that does; first a line about all of them."""
    groups: dict[str, dict[str, None]] = {}
    for call in graph.calls:
        if call.written_buffers:
            groups.setdefault(call.where, {}).update(dict.fromkeys(call.written_buffers))
    names = list(dict.fromkeys(name for here in groups.values() for name in here))
    if not names:
        return []
    lines = [f"{plural(len(names), 'buffer')} changed: {few(names, 2)}"]
    return lines + [f"{where}  changes {few(list(here), 2)}" for where, here in groups.items()]


def short(call: Call) -> str:
    """The function's last name."""
    return call.function.rsplit(".", 1)[-1].strip("_")


def plural(number: int, noun: str) -> str:
    """Write "1 place", "2 places"."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def few(names: Sequence[str], most: int) -> str:
    """Name the first of several things: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _program(graph: ModelGraph) -> str:
    how = "without computing" if graph.on_meta else "on real numbers"
    calls, modules = plural(len(graph.calls), "torch call"), sum(m.kind != "checkpoint" for m in graph.modules)
    regions = len(graph.modules) - modules
    text = f"{plural(graph.samples, 'sample')}, {calls} in {plural(modules, 'module call')}, recorded {how}"
    return text + (f"; {plural(regions, 'checkpointed region')}" if regions else "")


def _parameters(graph: ModelGraph) -> str:
    own = [info for info in graph.parameters if not info.is_buffer]
    used = {graph.parameter[name].name for call in graph.calls for name in call.parameters}
    kinds = {
        "tied": sum(bool(info.aliases) for info in own),
        "frozen": sum(not info.trainable for info in own),
        "not used": sum(info.name not in used for info in own),
    }
    which = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
    buffers = [info.bytes for info in graph.parameters if info.is_buffer]
    text = f"{format_count(graph.num_parameters)} ({format_bytes(graph.parameter_bytes)})"
    text += f" in {plural(len(own), 'tensor')}" + (f", {which}" if which else "")
    return text + (f"; {plural(len(buffers), 'buffer')} ({format_bytes(sum(buffers))})" if buffers else "")


def _forward(graph: ModelGraph) -> str:
    saved = sum(graph.storages[storage] for call in graph.calls for storage in call.saved)
    return f"{format_flops(graph.flops)}; {format_bytes(saved)} saved for backward"


def _repeated(graph: ModelGraph, block: Block) -> str:
    work = sum(call.flops for first, last in block.spans for call in graph.calls[first:last])
    share = f"; {work / graph.flops:.0%} of FLOPs" if graph.flops else ""
    calls, parameters = plural(block.calls, "call"), format_count(block.parameters)
    return f"{block.name}  {block.kind} x {block.count}, {calls} and {parameters} parameters each{share}"


def _reads(graph: ModelGraph, reads: Sequence[Call]) -> str:
    if reads:
        counts = Counter(short(call) for call in reads)
        named = few([f"{name} x {number}" if number > 1 else name for name, number in counts.items()], 4)
        return f"of what depends on parameters: {named}"
    return "of the batch alone" if graph.branches else "no value is read"


def _random(graph: ModelGraph) -> str:
    calls = [call for call in graph.calls if call.random]
    counts = Counter(short(call) for call in calls)
    texts = [f"{name} x {number}" if number > 1 else name for name, number in counts.items()]
    texts += ["Python's or numpy's numbers"] if graph.host_draws else []
    whole = len(by_micro_batch(graph))
    note = f"; {whole} drawn for a micro-batch, not for each sample" if whole else ""
    return few(texts, 4) + note if texts else "no random numbers"


def _block(label: str, texts: Sequence[str], none: str | None = None) -> list[tuple[str, str]]:
    shown = list(texts[:MOST_LINES]) or ([none] if none else [])
    shown += [f"and {len(texts) - MOST_LINES} more"] if len(texts) > MOST_LINES else []
    return [(label if number == 0 else "", text) for number, text in enumerate(shown)]


def _named(graph: ModelGraph, calls: Sequence[Call]) -> str:
    """Name the innermost module that holds all these calls, or the first and the last one."""
    paths = [call.module.split(".") if call.module else [] for call in calls]
    shared = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    path = ".".join(shared)
    kind = next((module.kind for module in graph.modules if module.path == path and path), "")
    if path:
        return f"{path} ({kind})" if kind else path
    ends = [call.module or short(call) for call in (calls[0], calls[-1])]
    return ends[0] if len(calls) == 1 else f"{ends[0]} ... {ends[1]}"
