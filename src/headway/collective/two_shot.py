"""TwoShot: sums float32 tensors over a group with a codec: pieces to their owners, sums in float32, sums to everyone.

    values    [ piece of rank 0 | piece of rank 1 | piece of rank 2 ]          one round; a large tensor has many
    scatter   each rank encodes every other rank's piece and sends it there
    sum       each rank adds what came to its own piece, in float32, and encodes and sends the result to everyone
    gather    each rank decodes every piece; also its own, so that all ranks end with the same bits

Rounds follow each other without a pause, also from one tensor to the next: while one is on the wire others are encoded
and summed. All messages of a round are awaited before anything is sent, so that none waits for its receiver. Each
value is rounded twice, on its way to the owner and on its way back, whatever the number of ranks; a ring would round
at every hop.

With a residual (error feedback) each rank first adds what its earlier messages lost, and keeps what this one loses: of
other ranks' pieces on the first way, of its own piece on the second. The sum over ranks is all that the wire owes.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.collective.codec import Codec
from headway.collective.pieces import by_collectives, lost, part_of
from headway.collective.world import Group, Pending, World

ROUND_VALUES = 1 << 20
"""Values of a round, over all pieces: with two ranks and 16 bits, messages of 1 MiB."""

LEAST_PIECE = 1 << 16
DEPTH = 3
"""Rounds whose pieces are on the wire at a time, and as many whose sums are."""

TAG_SHIFT, ROUND_BITS = 21, 20
LAST_TAG_BASE = 1022  # the probe has 1023; edges between stages count up from 0
TAG_BASES = 256


class Reduction:
    """A sum under way; the tensor may be read after `wait`."""

    def __init__(self, values: torch.Tensor, awaited: str, residual: torch.Tensor | None = None) -> None:
        self.values = values
        self.awaited = awaited
        self.residual = residual
        self.rounds_left = 0
        self.error: BaseException | None = None
        self.complete = threading.Event()

    def done(self) -> bool:
        """Tell whether waiting would return at once (true after a failure too: then `wait` raises)."""
        return self.complete.is_set()

    def wait(self) -> None:
        """Wait until the sum is there. Raises PeerError when a peer is lost or late."""
        # Each wait of the worker has the world's deadline, so this one always comes to an end.
        while not self.complete.wait(1.0):
            continue
        if self.error is not None:
            raise self.error


class TwoShot:
    """Sums float32 tensors in place over the ranks of `group`, written with `codec`, in the order of `start`.

    Every member makes it, and starts the same sums in the same order. On the CPU a thread does the work, beside
    whatever the caller computes. Reduce-scatter and all-gather after Thakur et al. 2005, "Optimization of Collective
    Communication Operations in MPICH".
    """

    def __init__(
        self, world: World, group: Group, codec: Codec, *, round_values: int = ROUND_VALUES, depth: int = DEPTH
    ) -> None:
        self.codec = codec
        self.feedback, self.block = codec.feedback, codec.block
        self._group = group
        self._world = world
        self._started: queue.SimpleQueue[Reduction | None] = queue.SimpleQueue()
        piece = max(LEAST_PIECE, round_values // group.size) if round_values >= LEAST_PIECE else round_values
        piece = -(-piece // codec.block) * codec.block
        tag_base = LAST_TAG_BASE - next(group.numbers) % TAG_BASES
        self._worker = _Worker(world, group, codec, self._started, piece, depth, tag_base)
        self._thread: threading.Thread | None = None
        # The thread knows the worker only, so that this object goes when its user does, and ends the thread.
        self._end = weakref.finalize(self, self._started.put, None)

    def start(
        self,
        values: torch.Tensor,
        awaited: str = "a sum",
        *,
        residual: torch.Tensor | None = None,
        slots: Sequence[object] = (),
    ) -> Reduction:
        """Begin to sum `values` (float32 [n], contiguous) in place, and return; do not touch them until `wait`.

        `residual` [n] is added first, and overwritten by what this rank's messages lose. Which parameters lie there
        (`slots`) makes no difference here.
        """
        if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
            raise ValueError(f"a codec takes contiguous float32 [n], got {values.dtype} {list(values.shape)}")
        reduction = Reduction(values.detach(), awaited, residual)
        if self._group.size == 1 or not values.numel():
            reduction.complete.set()
        elif values.device.type != "cpu":
            by_collectives(self._world, self._group, self.codec, reduction.values, awaited, residual)
            reduction.complete.set()
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._worker.run, name="two-shot sums", daemon=True)
                self._thread.start()
            self._started.put(reduction)
        return reduction

    def close(self) -> None:
        """End the thread, after what was started."""
        self._end()


@dataclass(eq=False)
class _Messages:
    """The messages of one round: buffers (bytes) by peer, and what is under way in them."""

    number: int = 0
    values: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    reduction: Reduction | None = None
    to_owner: dict[int, torch.Tensor] = field(default_factory=dict)
    to_me: dict[int, torch.Tensor] = field(default_factory=dict)
    result: torch.Tensor | None = None
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    pieces_coming: dict[int, Pending] = field(default_factory=dict)
    results_coming: dict[int, Pending] = field(default_factory=dict)
    sends: list[Pending] = field(default_factory=list)


class _Worker:
    """What the thread does: keeps `depth` rounds in each of the two shots, oldest first."""

    def __init__(
        self,
        world: World,
        group: Group,
        codec: Codec,
        started: queue.SimpleQueue[Reduction | None],
        piece: int,
        depth: int,
        tag_base: int,
    ) -> None:
        assert group.index is not None
        self._world, self._group, self._codec, self._started = world, group, codec, started
        self._piece, self._depth, self._tag_base = piece, depth, tag_base
        self._me = group.index
        # Each rank begins with its successor, so that no receiver is everybody's first.
        self._peers = [(group.index + step) % group.size for step in range(1, group.size)]
        self._scratch = torch.empty(0)
        self._waiting: Iterator[_Messages] | None = None
        self._scattered: deque[_Messages] = deque()
        self._summed: deque[_Messages] = deque()
        self._sent: deque[_Messages] = deque()  # complete, but for sends that may still be under way
        self._open: deque[Reduction] = deque()
        self._rounds = 0
        self._made = 0

    def run(self) -> None:
        """Work until None is taken from the queue. After a failure every sum fails with the same error."""
        error: BaseException | None = None
        try:
            with torch.no_grad():
                while self._advance():
                    continue
            return
        except BaseException as caught:
            error = caught
        for reduction in self._open:
            reduction.error = error
            reduction.complete.set()
        while (late := self._started.get()) is not None:
            late.error = error
            late.complete.set()

    def _advance(self) -> bool:
        """Do the next thing; False when there will be nothing more."""
        while len(self._scattered) < self._depth:
            idle = not self._scattered and not self._summed
            found = self._next(block=idle)
            if found is None:
                if idle:
                    return False
                break
            self._scatter(found)
        if self._scattered and len(self._summed) < self._depth:
            self._sum(self._scattered.popleft())
        else:
            self._gather(self._summed.popleft())
        return True

    def _next(self, block: bool) -> _Messages | None:
        """Return the next round; None when there is none now, or, with `block`, at the end."""
        while True:
            found = next(self._waiting, None) if self._waiting is not None else None
            if found is not None:
                return found
            self._waiting = None
            for messages in self._sent if block else ():
                _let_go(messages)
            try:
                reduction = self._started.get(block=block)
            except queue.Empty:
                return None
            if reduction is None:
                if not block:
                    self._started.put(None)  # seen again when all is done
                return None
            self._open.append(reduction)
            self._waiting = self._rounds_of(reduction)

    def _rounds_of(self, reduction: Reduction) -> Iterator[_Messages]:
        size = self._piece * self._group.size
        parts = reduction.values.split(size)
        reduction.rounds_left = len(parts)
        residuals = [None] * len(parts) if reduction.residual is None else reduction.residual.split(size)
        for values, residual in zip(parts, residuals, strict=True):
            messages = self._buffers()
            messages.values, messages.residual = values, residual
            messages.reduction, messages.number = reduction, self._rounds
            self._rounds += 1
            yield messages

    def _buffers(self) -> _Messages:
        if self._made < 2 * self._depth + 2:
            self._made += 1
            return _Messages()
        messages = self._sent.popleft()
        _let_go(messages)
        return messages

    # ---- the three parts of a round

    def _scatter(self, messages: _Messages) -> None:
        values, mine = messages.values, self._part(messages, self._me)
        assert values is not None
        if self._scratch.numel() < self._piece:
            self._scratch = torch.empty(self._piece)
        for peer in self._peers:
            if mine.numel():
                buffer = _buffer(messages.to_me, peer, self._codec.wire_bytes(mine.numel()))
                messages.pieces_coming[peer] = self._receive(messages, buffer, peer, 0)
            theirs = self._part(messages, peer)
            if theirs.numel():
                buffer = _buffer(messages.results, peer, self._codec.wire_bytes(theirs.numel()))
                messages.results_coming[peer] = self._receive(messages, buffer, peer, 1)
        if messages.residual is not None:
            values.add_(messages.residual)
        for peer in self._peers:
            theirs = self._part(messages, peer)
            if theirs.numel():
                buffer = _buffer(messages.to_owner, peer, self._codec.wire_bytes(theirs.numel()))
                self._codec.encode(theirs, buffer, self._scratch)
                messages.sends.append(self._send(messages, buffer, peer, 0))
                if messages.residual is not None:
                    lost(self._codec, theirs, buffer, self._residual(messages, peer), self._scratch)
        self._scattered.append(messages)

    def _sum(self, messages: _Messages) -> None:
        mine = self._part(messages, self._me)
        if mine.numel():
            size = self._codec.wire_bytes(mine.numel())
            for peer in self._peers:
                messages.pieces_coming.pop(peer).wait()
                self._codec.accumulate(messages.to_me[peer][:size], mine, self._scratch)
            if messages.result is None or messages.result.numel() < size:
                messages.result = torch.empty(size, dtype=torch.uint8)
            result = messages.result[:size]
            self._codec.encode(mine, result, self._scratch)
            for peer in self._peers:
                messages.sends.append(self._send(messages, result, peer, 1))
            if messages.residual is not None:
                lost(self._codec, mine, result, self._residual(messages, self._me), self._scratch)
            self._codec.decode(result, mine, self._scratch)
        self._summed.append(messages)

    def _gather(self, messages: _Messages) -> None:
        for peer in self._peers:
            theirs = self._part(messages, peer)
            if theirs.numel():
                messages.results_coming.pop(peer).wait()
                message = messages.results[peer][: self._codec.wire_bytes(theirs.numel())]
                self._codec.decode(message, theirs, self._scratch)
        reduction = messages.reduction
        assert reduction is not None
        messages.values = messages.residual = messages.reduction = None
        self._sent.append(messages)
        reduction.rounds_left -= 1
        if not reduction.rounds_left:
            self._open.popleft()
            reduction.complete.set()

    # ---- messages

    def _part(self, messages: _Messages, owner: int) -> torch.Tensor:
        assert messages.values is not None
        return part_of(messages.values, owner, self._group.size, self._codec.block)

    def _residual(self, messages: _Messages, owner: int) -> torch.Tensor:
        assert messages.residual is not None
        return part_of(messages.residual, owner, self._group.size, self._codec.block)

    def _send(self, messages: _Messages, buffer: torch.Tensor, peer: int, shot: int) -> Pending:
        return self._post(self._group.handle.send, messages, buffer, peer, shot, "to take")

    def _receive(self, messages: _Messages, buffer: torch.Tensor, peer: int, shot: int) -> Pending:
        return self._post(self._group.handle.recv, messages, buffer, peer, shot, "to send")

    def _post(
        self, call: Callable[..., Any], messages: _Messages, buffer: torch.Tensor, peer: int, shot: int, verb: str
    ) -> Pending:
        assert messages.reduction is not None
        peers = (self._group.ranks[peer],)
        awaited = f"rank {peers[0]} {verb} its {'sum' if shot else 'part'} of {messages.reduction.awaited}"
        tag = self._tag_base << TAG_SHIFT | messages.number % (1 << ROUND_BITS - 1) << 1 | shot
        return self._world.begin(lambda: call([buffer], peer, tag), awaited, peers, buffer, message=True)


def _let_go(messages: _Messages) -> None:
    """Wait until what was sent from these buffers has gone."""
    for send in messages.sends:
        send.wait()
    messages.sends.clear()


def _buffer(buffers: dict[int, torch.Tensor], peer: int, size: int) -> torch.Tensor:
    """Return a message of `size` bytes to or from a peer, in memory that grows to the largest one."""
    if peer not in buffers or buffers[peer].numel() < size:
        buffers[peer] = torch.empty(size, dtype=torch.uint8)
    return buffers[peer][:size]
