"""Execute: walks this rank's actions, one by one; the only interpreter of schedules."""

from __future__ import annotations

import pickle
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.collective.channel import Channel, Signature, signature_of
from headway.collective.world import World
from headway.errors import HeadwayError
from headway.graph.walk import all_tensors
from headway.layout.split import Crossing, Split
from headway.run.apart import Apart, Later
from headway.run.autocast import forget_casts, without_autocast
from headway.run.failure import InPlace
from headway.run.keep import Kept
from headway.run.microbatch import LossParts, copied, read_loss
from headway.run.outputs import Program, merged
from headway.run.randomness import Chance
from headway.run.stage import Key, Stage, StageResult
from headway.schedule.action import BACKWARDS, Action, Edge, Kind, Schedule

POSTED_AHEAD = 2
"""Messages of one channel that are awaited at once: one being used, one on its way."""

Seen = tuple[Action, float, float]


@dataclass(frozen=True)
class Wires:
    """This rank's ends of the channels between stages of its copy, by (source stage, target stage)."""

    split: Split
    activations: Mapping[Edge, Channel]
    gradients: Mapping[Edge, Channel]
    crossings: Mapping[Edge, tuple[Crossing, ...]]  # what goes over each edge, in a fixed order
    sources: Mapping[int, frozenset[int]]  # the stages that a stage gets something from
    targets: Mapping[int, frozenset[int]]
    signatures: dict[Any, Signature] = field(default_factory=dict)  # what came before, so that it can be posted ahead

    @staticmethod
    def lay(world: World, split: Split, rank_of: Callable[[int], int]) -> Wires:
        """Open the channels between the stages that are on different ranks; `rank_of(stage)` is the rank of one."""
        activations, gradients = {}, {}
        for number, (source, target) in enumerate(split.edges):
            here, there = rank_of(source), rank_of(target)
            if here != there and world.rank in (here, there):
                activations[(source, target)] = Channel(world, here, there, 2 * number)
                gradients[(source, target)] = Channel(world, there, here, 2 * number + 1)
        edges = split.edges
        stages = range(split.num_stages)
        return Wires(
            split,
            activations,
            gradients,
            {edge: split.crossings(*edge) for edge in edges},
            {stage: frozenset(s for s, t in edges if t == stage) for stage in stages},
            {stage: frozenset(t for s, t in edges if s == stage) for stage in stages},
        )

    def channel(self, action: Action) -> Channel:
        """Give the channel that a message goes over."""
        assert action.peer is not None
        if action.kind is Kind.SEND:
            return self.activations[(action.stage, action.peer)]
        if action.kind is Kind.RECV:
            return self.activations[(action.peer, action.stage)]
        if action.kind is Kind.SEND_GRAD:
            return self.gradients[(action.peer, action.stage)]
        return self.gradients[(action.stage, action.peer)]

    def flush(self) -> None:
        """Wait until all messages have gone."""
        for channel in (*self.activations.values(), *self.gradients.values()):
            if channel.world.rank == channel.source_rank:
                channel.flush()


@dataclass
class Pass:
    """What one stage holds of one micro-batch between its forward and its backward."""

    received: dict[Key, torch.Tensor]
    result: StageResult
    loss: torch.Tensor | None = None


@dataclass
class Step:
    """One walk over a schedule: its micro-batches, what is in flight, and what came out."""

    stages: Mapping[int, Stage]
    wires: Wires
    kept: Kept
    micro_batches: Sequence[Any]
    sizes: Sequence[int]
    chances: Sequence[Chance | None]
    whole: int | None = None  # samples of the global batch, where losses are added up
    scale: float = 1.0  # gradients are those of the sum of totals times this
    program: Program | None = None  # call this instead of the loss, and keep what the model returns
    apart: Apart | None = None  # under a schedule whose backward is split
    passes: dict[tuple[int, int], Pass] = field(default_factory=dict)
    arrived: dict[tuple[int, int], dict[Key, torch.Tensor]] = field(default_factory=dict)
    answers: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], dict[Key, torch.Tensor]] = field(default_factory=dict)
    later: dict[tuple[int, int], Later] = field(default_factory=dict)  # between I and W
    losses: list[LossParts] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)  # of micro-batches with so many samples
    given: dict[tuple[int, int], set[int | None]] = field(default_factory=dict)

    def walk(self, actions: Sequence[Action], last: Mapping[int, Container[str]]) -> None:
        """Do all actions of one rank; `last` is what `sums_after` gives. Errors name stage, micro-batch, module."""
        upcoming = self._upcoming(actions)
        for waiting in upcoming.values():
            self._post(waiting, POSTED_AHEAD)
        do = {
            Kind.F: self._forward, Kind.B: self._backward, Kind.SEND: self._send, Kind.RECV: self._receive,
            Kind.SEND_GRAD: self._send_gradient, Kind.RECV_GRAD: self._receive_gradient, Kind.REDUCE: self._reduce,
            Kind.I: self._backward, Kind.W: self._weights,
        }  # fmt: skip
        for index, action in enumerate(actions):
            start = time.perf_counter()
            if index in last:
                self.kept.reducer.arm(last[index])
            do[action.kind](action)
            if index in last:
                self.kept.reducer.complete(last[index])
            if action.kind in (Kind.RECV, Kind.RECV_GRAD):
                self._post(upcoming[id(self.wires.channel(action))], 1)
            self.seen.append((action, start, time.perf_counter()))

    # messages

    def _upcoming(self, actions: Iterable[Action]) -> dict[int, deque[Action]]:
        """List, for each channel that ends here, the messages still to be posted."""
        waiting: dict[int, deque[Action]] = {}
        for action in actions:
            if action.kind in (Kind.RECV, Kind.RECV_GRAD):
                waiting.setdefault(id(self.wires.channel(action)), deque()).append(action)
        return waiting

    def _post(self, waiting: deque[Action], count: int) -> None:
        for _ in range(min(count, len(waiting))):
            action = waiting.popleft()
            self.wires.channel(action).post(action.micro, self.wires.signatures.get(self._signature_key(action)))

    def _signature_key(self, action: Action) -> Any:
        way = (torch.is_grad_enabled(), self.program is None)
        return (action.kind, action.stage, action.peer, *way, self._mark(action))

    def _mark(self, action: Action) -> int:
        """Tell a micro-batch by the shapes of its tensors: they are the same on all ranks of a copy."""
        size = self.sizes[action.micro]
        mark = self.marks.get(size)
        if mark is None:
            mark = self.marks[size] = zlib.crc32(repr(_shapes(self.micro_batches[action.micro])).encode())
        return mark

    def _send(self, action: Action) -> None:
        assert action.peer is not None
        done = self.passes[(action.stage, action.micro)]
        crossings = self.wires.crossings[(action.stage, action.peer)]
        present = [done.result.sends.get(c.key) for c in crossings]
        note = b""
        missing = [i for i, tensor in enumerate(present) if tensor is None]
        if missing or done.result.answers:
            note = pickle.dumps((missing, dict(done.result.answers)))
        self.wires.channel(action).send(
            action.micro, [t.detach() for t in present if t is not None], note, mark=self._mark(action)
        )
        if not torch.is_grad_enabled():
            self._handed(action.stage, action.micro, action.peer)

    def _receive(self, action: Action) -> None:
        assert action.peer is not None
        tensors, note = self.wires.channel(action).receive(action.micro, mark=self._mark(action))
        if not self.wires.split.reads:  # shapes that depend on values cannot be expected
            self.wires.signatures[self._signature_key(action)] = signature_of(tensors)
        missing, answers = pickle.loads(note) if note else ((), {})
        crossings = [c for i, c in enumerate(self.wires.crossings[(action.peer, action.stage)]) if i not in missing]
        place = (action.stage, action.micro)
        box = self.arrived.setdefault(place, {})
        self.answers.setdefault(place, {}).update(answers)
        for crossing, tensor in zip(crossings, tensors, strict=True):
            box[crossing.key] = _leaf(tensor, crossing.differentiable)

    def _send_gradient(self, action: Action) -> None:
        assert action.peer is not None
        done = self.passes[(action.stage, action.micro)]
        gradients: list[torch.Tensor] = []
        absent: list[int] = []
        for crossing in self.wires.crossings[(action.peer, action.stage)]:
            tensor = done.received.get(crossing.key)
            if tensor is None or not crossing.differentiable:
                continue
            if tensor.grad is None:  # the loss does not follow from it: one process leaves what made it alone
                absent.append(len(gradients))
            gradients.append(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
        self.wires.channel(action).send(action.micro, gradients, pickle.dumps(absent) if absent else b"")
        self._handed(action.stage, action.micro, action.peer)

    def _handed(self, stage: int, micro: int, to: int | None) -> None:
        """Let go of a pass when all who need it have had it: in training its sources and its own backward (None)."""
        place = (stage, micro)
        given = self.given.setdefault(place, set())
        given.add(to)
        training = torch.is_grad_enabled()
        needed: frozenset[int | None] = self.wires.sources[stage] | {None} if training else self.wires.targets[stage]
        if given >= needed:
            self.passes.pop(place, None)

    def _receive_gradient(self, action: Action) -> None:
        assert action.peer is not None
        tensors, note = self.wires.channel(action).receive(action.micro)
        if not self.wires.split.reads:
            self.wires.signatures[self._signature_key(action)] = signature_of(tensors)
        done = self.passes[(action.stage, action.micro)]
        crossings = self.wires.crossings[(action.stage, action.peer)]
        expected = [c.key for c in crossings if c.differentiable and c.key in done.result.sends]
        absent = pickle.loads(note) if note else ()
        found = {
            key: gradient
            for number, (key, gradient) in enumerate(zip(expected, tensors, strict=True))
            if number not in absent
        }
        self._add_gradients(action.stage, action.micro, found)

    def _add_gradients(self, stage: int, micro: int, gradients: Mapping[Key, torch.Tensor]) -> None:
        box = self.gradients.setdefault((stage, micro), {})
        for key, gradient in gradients.items():
            box[key] = box[key] + gradient if key in box else gradient

    # computation

    def _forward(self, action: Action) -> None:
        stage, micro, place = action.stage, action.micro, (action.stage, action.micro)
        received = self.arrived.pop(place, {})
        answers = self.answers.pop(place, {})
        for source in self.wires.sources[stage] & self.stages.keys():  # handed over on the same rank
            made = self.passes[(source, micro)].result
            answers.update(made.answers)
            for crossing in self.wires.crossings[(source, stage)]:
                if crossing.key in made.sends:
                    received[crossing.key] = self._hand_over(made.sends[crossing.key], crossing)
            if not torch.is_grad_enabled():
                self._handed(source, micro, stage)
        forget_casts(self.stages[stage].device.type)
        with InPlace(self.stages[stage], micro):
            run = self.stages[stage].run
            batch = self.micro_batches[micro]
            batch = batch if len(self.stages) == 1 else copied(batch)  # each stage runs the calls that may write it
            result = self.kept.run(lambda: run(
                batch, received, answers, self.chances[micro],
                program=self.program, around=self.apart,
            ))  # fmt: skip
            done = Pass(received, result)
            if self.program is not None:
                if result.captured is not None:
                    before = self.outputs.get(micro)
                    self.outputs[micro] = result.captured if before is None else merged(before, result.captured)
            elif self.wires.split.stages[stage].end is None:
                parts = read_loss(result.output, self.sizes[micro], self.whole)
                if torch.is_grad_enabled() and parts.count and not parts.total.requires_grad:
                    raise HeadwayError(
                        "nothing can be learned from this loss: it needs no gradient",
                        place="what the loss function returned",
                        remedy="parameters that require gradients, and no detach(), item() or torch.no_grad() between "
                        "them and the loss",
                    )
                done.loss = parts.total
                self.losses.append(LossParts(parts.total.detach(), parts.count, parts.metrics))
                done.result = StageResult(result.sends, result.answers)
        if torch.is_grad_enabled() or self.wires.targets[stage]:
            self.passes[place] = done

    def _backward(self, action: Action) -> None:
        stage, micro, place = action.stage, action.micro, (action.stage, action.micro)
        done = self.passes[place]
        for target in self.wires.targets[stage] & self.stages.keys():
            theirs = self.passes[(target, micro)].received
            for crossing in self.wires.crossings[(stage, target)]:
                tensor = theirs.get(crossing.key)
                if tensor is not None and tensor.grad is not None:
                    self._add_gradients(stage, micro, {crossing.key: tensor.grad})
            self._handed(target, micro, stage)
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        if done.loss is not None and done.loss.requires_grad:
            roots.append(done.loss)
            gradients.append(torch.full_like(done.loss, self.scale))
        for key, gradient in self.gradients.pop(place, {}).items():
            made = done.result.sends[key]
            if made.requires_grad:
                roots.append(made)
                gradients.append(gradient)
        if roots:
            with InPlace(self.stages[stage], micro, "backward"), without_autocast(roots[0].device.type):
                if action.kind is Kind.I and self.apart is not None:
                    with self.apart.collect(roots) as self.later[place]:
                        torch.autograd.backward(roots, gradients)
                else:
                    torch.autograd.backward(roots, gradients)
        done.loss, done.result = None, StageResult({}, {})
        self._handed(stage, micro, None)

    def _weights(self, action: Action) -> None:
        later = self.later.pop((action.stage, action.micro), None)
        if later is not None:
            stage = self.stages[action.stage]
            with InPlace(stage, action.micro, "backward"), without_autocast(stage.device.type):
                later.finish()

    @staticmethod
    def _hand_over(tensor: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        """Give a value of one stage to another on the same rank: its memory too, unless that is written there."""
        given = _leaf(tensor.detach(), crossing.differentiable)
        return given.clone() if crossing.written and not given.requires_grad else given

    def _reduce(self, action: Action) -> None:
        """Nothing: the reducer was armed before the last backward and works by itself; the step waits at its end."""


def sums_after(
    schedule: Schedule, rank: int, split: Split, *, every_backward: bool = False
) -> dict[int, frozenset[str]]:
    """Map the indices of a rank's actions after which gradients are summed to the names of their parameters.

    That is after each parameter's last backward of a step, or after every one.
    """
    if every_backward:
        whole = {index: a for index, a in enumerate(schedule.ranks[rank]) if a.kind in (Kind.B, Kind.W)}
        return {index: frozenset(split.stages[a.stage].parameters) for index, a in whole.items()}
    last = {a.stage: index for index, a in enumerate(schedule.ranks[rank]) if a.kind in BACKWARDS}
    complete: dict[str, int] = {}
    for stage, index in last.items():
        for name in split.stages[stage].parameters:
            complete[name] = max(index, complete.get(name, index))  # a tied one may be in several stages
    found: dict[int, set[str]] = {}
    for name, index in complete.items():
        found.setdefault(index, set()).add(name)
    return {index: frozenset(names) for index, names in found.items()}


def _leaf(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return tensor.requires_grad_() if differentiable and torch.is_grad_enabled() else tensor


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in all_tensors(batch))
