"""Courier: carries tensors to the one rank of a group that owns them, which sums them, and from there to everyone.

    collect    every other rank sends its values to the owner, encoded or as they lie; the owner adds them to its own
    spread     the owner sends its values to every other rank, as they lie

With owners spread evenly over the ranks, a collect of everything is a reduce-scatter and a spread an all-gather: each
rank sends and receives (n - 1) / n of all bytes. Pieces of about 1 MB follow each other without a pause, also from one
tensor to the next; an owner adds them in one fixed order.

Two threads: what comes to this rank, and what goes from it. Gloo's "I am ready to receive" waits in the connection
behind all that is being sent there, and the other side does not begin before it has it; so many receives are posted
ahead and few sends at a time. With one queue for both, a link carried one direction at a time.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway.collective.codec import Codec
from headway.collective.two_shot import LAST_TAG_BASE, TAG_BASES, TAG_SHIFT
from headway.collective.world import Group, Pending, World

PIECE_BYTES = 1 << 20
"""Bytes of one piece as it lies, over all senders or all receivers."""

LEAST_PIECE = 1 << 16
"""Values of a piece at least, so that many ranks do not mean many small messages."""

COMES, GOES = 0, 1
DEPTHS = (12, 3)
"""Pieces that are awaited ahead, and that are sent at a time."""

NUMBERS = 1 << TAG_SHIFT


class Waited(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Wait for it."""


class Delivery:
    """A collect or a spread under way; the values may be read or written after `wait`.

    `then` is called when all has come and gone, by the courier's thread; what it begins is waited for too.
    """

    def __init__(self, then: Callable[[], Waited | None] | None = None) -> None:
        self.pieces_left = 0
        self.error: BaseException | None = None
        self.complete = threading.Event()
        self._then = then
        self._further: Waited | None = None

    def arrive(self) -> None:
        """Say that all has come and gone."""
        then, self._then = self._then, None
        self._further = then() if then is not None else None
        self.complete.set()

    def wait(self) -> None:
        """Wait until all has come and gone. Raises PeerError when a peer is lost or late."""
        # Each wait of the worker has the world's deadline, so this one always comes to an end.
        while not self.complete.wait(1.0):
            continue
        if self.error is not None:
            raise self.error
        if self._further is not None:
            self._further.wait()


@dataclass(frozen=True, eq=False)
class _Task:
    """What was asked for: `values` [n] go to `owner` (an index in the group), or from there to everyone."""

    delivery: Delivery
    values: torch.Tensor
    owner: int
    collect: bool
    awaited: str
    parts: tuple[torch.Tensor, ...] = ()
    number: int = 0  # of its first piece


@dataclass(eq=False)
class _Piece:
    """A part of a task on the wire: messages of others by peer, what is being sent, and the memory for it."""

    delivery: Delivery
    values: torch.Tensor
    coded: bool
    number: int
    add: bool = False
    coming: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)
    going: list[Pending] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


class Courier:
    """Carries tensors between the ranks of `group`, in the order of `collect` and `spread`, the same on every member.

    `codec` writes float32 on its way to the owner; everything else, and all that is spread, is exact. On the CPU
    threads do the work, beside whatever the caller computes; what is collected must be awaited before it is spread.
    """

    def __init__(self, world: World, group: Group, codec: Codec | None = None) -> None:
        self._world, self._group = world, group
        self._codec = None if codec is None or codec.exact else codec
        tag_base = LAST_TAG_BASE - next(group.numbers) % TAG_BASES
        self._lanes = [_Worker(world, group, self._codec, depth, tag_base) for depth in DEPTHS]
        self._threads: dict[int, threading.Thread] = {}
        self._held: list[_Task] | None = None
        self._number = 0
        # The threads know the workers only, so that this object goes when its user does, and ends them.
        self._end = weakref.finalize(self, _end, [lane.started for lane in self._lanes])

    def collect(
        self, values: torch.Tensor, owner: int, awaited: str = "a sum", then: Callable[[], Waited | None] | None = None
    ) -> Delivery:
        """Begin to add every rank's `values` (contiguous [n]) to those of the group's rank number `owner`, in place.

        On other ranks they must stay as they are until `wait`. `then` as for Delivery, on this rank alone.
        """
        return self._start(_Task(Delivery(then), values.detach(), owner, True, awaited))

    def spread(
        self, values: torch.Tensor, owner: int, awaited: str = "values", then: Callable[[], Waited | None] | None = None
    ) -> Delivery:
        """Begin to overwrite every other rank's `values` (contiguous [n]) by those of rank number `owner`."""
        return self._start(_Task(Delivery(then), values.detach(), owner, False, awaited))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Post what comes of the tasks that are begun inside before any of them is sent."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for task in held:
                self._enqueue(GOES, task)

    def close(self) -> None:
        """End the threads, after what was started."""
        self._end()

    def _start(self, task: _Task) -> Delivery:
        values = task.values
        if values.dim() != 1 or not values.is_contiguous():
            raise ValueError(f"a courier takes contiguous [n], got {list(values.shape)}, strides {values.stride()}")
        if self._group.size == 1 or not values.numel():
            task.delivery.arrive()
        elif values.device.type != "cpu":
            by_collectives(self._world, self._group, self._codec, values, task.owner, task.collect, task.awaited)
            task.delivery.arrive()
        else:
            # pieces are numbered here, in the order of all ranks' calls; the two lanes go on by themselves
            task = replace(task, parts=values.split(self._piece(task)), number=self._number)
            self._number += len(task.parts)
            task.delivery.pieces_left = len(task.parts)
            lane = COMES if task.collect == (task.owner == self._group.index) else GOES
            if lane == GOES and self._held is not None:
                self._held.append(task)
            else:
                self._enqueue(lane, task)
        return task.delivery

    def _enqueue(self, lane: int, task: _Task) -> None:
        if lane not in self._threads:
            self._threads[lane] = threading.Thread(target=self._lanes[lane].run, name="courier", daemon=True)
            self._threads[lane].start()
        self._lanes[lane].started.put(task)

    def _piece(self, task: _Task) -> int:
        """Return how many values are in a piece: whole blocks of the codec."""
        coded = task.collect and self._codec is not None and task.values.dtype == torch.float32
        block = self._codec.block if coded and self._codec is not None else 1
        return max(LEAST_PIECE, PIECE_BYTES // task.values.element_size() // (self._group.size - 1) // block * block)


def _end(queues: Sequence[queue.SimpleQueue[_Task | None]]) -> None:
    for started in queues:
        started.put(None)


class _Worker:
    """What a thread does: keeps `depth` pieces on the wire, oldest first."""

    def __init__(self, world: World, group: Group, codec: Codec | None, depth: int, tag_base: int) -> None:
        assert group.index is not None
        self.started: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._world, self._group, self._codec = world, group, codec
        self._depth, self._tag_base, self._me = depth, tag_base, group.index
        # Each rank begins with its successor, so that no receiver is everybody's first.
        self._peers = [(group.index + step) % group.size for step in range(1, group.size)]
        self._waiting: Iterator[_Piece] = iter(())
        self._open: deque[_Piece] = deque()
        self._free: list[torch.Tensor] = []
        self._scratch = torch.empty(0)
        self._last = Delivery()  # what was put on the wire last, at least in part

    def run(self) -> None:
        """Work until None is taken from the queue. After a failure every delivery fails with the same error."""
        try:
            with torch.no_grad():
                while (found := self._next(block=not self._open)) is not None or self._open:
                    if found is not None:
                        self._open.append(found)
                    if found is None or len(self._open) >= self._depth:
                        self._finish(self._open.popleft())
            return
        except BaseException as caught:
            error = caught
        for delivery in (*(piece.delivery for piece in self._open), self._last):
            delivery.error = error
            delivery.complete.set()
        self._waiting = iter(())
        while (late := self.started.get()) is not None:
            late.delivery.error = error
            late.delivery.complete.set()

    def _next(self, block: bool) -> _Piece | None:
        """Put the next piece on the wire; None when there is none now, or, with `block`, at the end."""
        while True:
            found = next(self._waiting, None)
            if found is not None:
                return found
            try:
                task = self.started.get(block=block)
            except queue.Empty:
                return None
            if task is None:
                if not block:
                    self.started.put(None)  # seen again when all is done
                return None
            self._waiting = self._pieces(task)

    def _pieces(self, task: _Task) -> Iterator[_Piece]:
        coded = task.collect and self._codec is not None and task.values.dtype == torch.float32
        self._last = task.delivery
        for number, values in enumerate(task.parts, task.number):
            piece = _Piece(task.delivery, values, coded, number)
            (self._collect if task.collect else self._spread)(piece, task)
            yield piece

    # ---- putting a piece on the wire, and taking it off

    def _collect(self, piece: _Piece, task: _Task) -> None:
        message = piece.values.view(torch.uint8)
        size = self._codec.wire_bytes(piece.values.numel()) if piece.coded and self._codec else message.numel()
        if piece.coded and self._scratch.numel() < piece.values.numel():
            self._scratch = torch.empty(-(-piece.values.numel() // 1024) * 1024)
        if task.owner == self._me:
            piece.add = True
            for peer in self._peers:
                buffer = self._buffer(piece, size)
                piece.coming.append((self._post("recv", buffer, peer, piece, task, "to send its part of"), buffer))
            return
        if piece.coded and self._codec is not None:
            message = self._buffer(piece, size)
            self._codec.encode(piece.values, message, self._scratch)
        piece.going.append(self._post("send", message, task.owner, piece, task, "to take its part of"))

    def _spread(self, piece: _Piece, task: _Task) -> None:
        message = piece.values.view(torch.uint8)
        if task.owner == self._me:
            piece.going += [self._post("send", message, peer, piece, task, "to take") for peer in self._peers]
        else:
            piece.coming.append((self._post("recv", message, task.owner, piece, task, "to send"), message))

    def _finish(self, piece: _Piece) -> None:
        try:
            for pending, message in piece.coming:
                pending.wait()
                if not piece.add:
                    continue
                if piece.coded and self._codec is not None:
                    self._codec.accumulate(message, piece.values, self._scratch)
                else:
                    piece.values.add_(message.view(piece.values.dtype))
            for pending in piece.going:
                pending.wait()
            self._free += piece.buffers
            piece.delivery.pieces_left -= 1
            if not piece.delivery.pieces_left:
                piece.delivery.arrive()
        except BaseException as error:
            piece.delivery.error = error
            piece.delivery.complete.set()
            raise

    # ---- messages

    def _buffer(self, piece: _Piece, size: int) -> torch.Tensor:
        """Return a message of `size` bytes, in memory that is free or new."""
        place = next((i for i, buffer in enumerate(self._free) if buffer.numel() >= size), None)
        if place is not None:
            whole = self._free.pop(place)
        else:
            if self._free:
                self._free.pop()  # a larger one takes its place, so that there are never more than were needed at once
            whole = torch.empty(size, dtype=torch.uint8)
        piece.buffers.append(whole)
        return whole[:size]

    def _post(self, way: str, message: torch.Tensor, peer: int, piece: _Piece, task: _Task, verb: str) -> Pending:
        call: Callable[..., Any] = self._group.handle.send if way == "send" else self._group.handle.recv
        peers = (self._group.ranks[peer],)
        awaited = f"rank {peers[0]} {verb} {task.awaited}"
        tag = self._tag_base << TAG_SHIFT | piece.number % NUMBERS
        return self._world.begin(lambda: call([message], peer, tag), awaited, peers, message, message=True)


def by_collectives(
    world: World, group: Group, codec: Codec | None, values: torch.Tensor, owner: int, collect: bool, awaited: str
) -> None:
    """Collect or spread `values` by torch's collectives: for devices whose messages have no tags."""
    assert group.index is not None
    peers, root, mine = world.others(group), group.ranks[owner], owner == group.index

    def done(call: Callable[[], Any], keep: object) -> None:
        world.begin(call, awaited, peers, keep).wait()

    if not collect:
        done(lambda: dist.broadcast(values, src=root, group=group.handle, async_op=True), values)
    elif codec is None or values.dtype != torch.float32:
        total = values if mine else values.clone()  # what is not the root's may be overwritten
        done(lambda: dist.reduce(total, dst=root, group=group.handle, async_op=True), total)
    else:
        scratch = torch.empty(-(-values.numel() // 1024) * 1024, device=values.device)
        message = torch.zeros(codec.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        if not mine:
            codec.encode(values, message, scratch)
        parts = [torch.empty_like(message) for _ in group.ranks] if mine else []
        done(lambda: dist.gather(message, parts or None, dst=root, group=group.handle, async_op=True), (message, parts))
        for part in parts[group.index + 1 :] + parts[: group.index]:
            codec.accumulate(part, values, scratch)
