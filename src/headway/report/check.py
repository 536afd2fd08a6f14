"""What `headway check` says of a script: what was recorded, and line by line what stands in the way of a division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway.errors import HeadwayError, SplitError
from headway.graph.model import Call, ModelGraph
from headway.graph.picture import (
    boundary_text,
    by_micro_batch,
    by_place,
    changing_buffers,
    few,
    large_parts,
    plural,
    refusals,
    short,
)
from headway.journal import Verified

# Calls that hand a tensor's content to Python, or whose result's shape depends on it.
READING = frozenset("bool item tolist numpy int float index nonzero unique equal allclose is_nonzero".split())

MOST_LINES = 12
"""Lines of the user's code that are listed for each thing in the way."""


@dataclass(frozen=True)
class Checked:
    """A script's batch and its program, or why it could not be recorded or does not come out alike in two stages."""

    leaves: tuple[str, ...]
    graph: ModelGraph | None
    refusal: HeadwayError | None = None
    weighs: str = ""  # how losses of parts make the loss of a batch, where that is not their mean
    tried: str = ""  # what came of two stages beside the undivided model

    @property
    def can_be_split(self) -> bool:
        """Whether there is a place where a second stage may begin."""
        return self.graph is not None and bool(self.graph.cuts) and self.refusal is None

    def __str__(self) -> str:
        lines = _labelled("batch", list(self.leaves) or ["no leaves"])
        if self.graph is None:
            cannot = (
                f"cannot be {'split' if isinstance(self.refusal, SplitError) else 'trained'}: it could not be recorded"
            )
            return "\n".join([*lines, f"{'verdict':<10} {cannot}", str(self.refusal)])
        lines += [str(self.graph), *_labelled("in the way", in_the_way(self.graph) or ["nothing"])]
        lines += _labelled("loss", [self.weighs] if self.weighs else [])
        lines += _labelled("tried", [self.tried] if self.tried else [])
        if self.refusal is not None:
            return "\n".join([*lines, f"{'verdict':<10} cannot be split: it was tried", str(self.refusal)])
        return "\n".join([*lines, *_labelled("verdict", [_verdict(self.graph)])])


def leaf_text(place: str, leaf: Any) -> str:
    """Describe a leaf of a batch: "batch['x']: float32 [8, 3, 32, 32]"; `Shared` ones hold a tensor."""
    tensor = getattr(leaf, "tensor", leaf)
    if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
        if isinstance(leaf, list | tuple):
            return f"{place}: {len(leaf)} texts"
        return f"{place}: {type(leaf).__name__}, given to every micro-batch"
    shape = ", ".join(map(str, tensor.shape))
    shared = "" if tensor is leaf else ", shared by all samples"
    return f"{place}: {str(tensor.dtype).removeprefix('torch.')} [{shape}]{shared}"


def tried_text(tried: Verified) -> str:
    """Say what came of a comparison: "2 stages against the undivided model, 2 samples: same to 1e-16"."""
    return (
        tried.what
        if tried.largest_difference is None
        else f"{tried.what}: same to {max(tried.largest_difference, 1e-16):.0e}"
    )


def in_the_way(graph: ModelGraph) -> list[str]:
    """List what limits a division, or lets it differ, each with file and line of the user's code."""
    lines: list[str] = []
    for found in (_reads(graph), _draws(graph), _buffers(graph), _together(graph)):
        listed = list(found)
        lines += listed[:MOST_LINES]
        lines += [f"and {plural(len(listed) - MOST_LINES, 'line')} more"] if len(listed) > MOST_LINES else []
    if graph.cuts:
        cut = max(graph.cuts, key=lambda cut: cut.bytes)
        lines.append(f"{graph.calls[cut.index].where}  the biggest boundary: {boundary_text(cut)}")
    return lines


def _reads(graph: ModelGraph) -> Iterator[str]:
    asked = set(graph.asked)
    for (where, function), calls in by_place(call for call in graph.calls if call.reads_value).items():
        if calls[0].function in asked:
            what = f"{function} makes a shape that only the stage that computes it knows; it tells the others"
        else:
            what = f"{function} reads a value that depends on parameters: the stage that has it tells the others"
        yield f"{where}  {what}{_inside(calls)}"
    batch = [call for call in graph.calls if not call.derived and short(call) in READING]
    for (where, function), calls in by_place(batch).items():
        yield f"{where}  {function} reads a value of the batch: another may go another way{_inside(calls)}"
    if graph.branches and not batch and not any(call.reads_value for call in graph.calls):
        yield "a value of the batch is read: another may go another way"


def _draws(graph: ModelGraph) -> Iterator[str]:
    others = "micro-batches of other sizes draw other numbers"
    for (where, function), calls in by_place(by_micro_batch(graph)).items():
        yield f"{where}  {function} draws for a whole micro-batch: {others}{_inside(calls)}"
    for where in graph.host_draws if "?" in " ".join(graph.host) else ():
        yield f"{where}  Python's or numpy's random numbers are drawn here or shortly before: {others}"


def _buffers(graph: ModelGraph) -> Iterator[str]:
    for line in changing_buffers(graph)[1:]:
        yield f"{line}: each stays on the stage that uses it"


def _together(graph: ModelGraph) -> Iterator[str]:
    for text, where in refusals(graph):
        yield f"{where}  {text}"
    for part in large_parts(graph):
        name = f"{part.name}, {plural(part.last - part.first, 'call')}"
        yield f"{part.where}  stays whole: {name} with {part.shares}"


def _inside(calls: list[Call]) -> str:
    names = list(dict.fromkeys(call.module for call in calls if call.module))
    return f" ({few(names, 2)})" if names else ""


def _verdict(graph: ModelGraph) -> str:
    if graph.cuts:
        return f"can be split: a stage may begin at {plural(len(graph.cuts), 'place')}"
    return "cannot be split into stages; copies of the whole model (data parallelism) work"


def _labelled(label: str, texts: list[str]) -> list[str]:
    return [f"{label if number == 0 else '':<10} {text}" for number, text in enumerate(texts)]
