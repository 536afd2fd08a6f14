"""Hierarchy: sums within each host first, then across hosts, then back: the slow link carries each value once a host.

    host 0: ranks 0, 1     [a a | b b]   each rank gets one piece of its neighbours' values, and adds them up
    across                 rank 0 with rank 2: the a;  rank 1 with rank 3: the b       exactly, or with a codec
    host 0                 each rank gives its piece to its neighbours

One after the other, an all-reduce over all ranks sends 2 (n - 1) / n of the values over each host's link, this way
2 (hosts - 1) / hosts; a two-shot sum with a codec as many times more as there are ranks a host. Two threads, one for
the way there and one for the way back, each with groups of its own, so that their order is the same on all ranks.
Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision".
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.collective.codec import Codec
from headway.collective.pieces import by_collectives
from headway.collective.two_shot import Reduction, TwoShot
from headway.collective.world import Group, Pending, World
from headway.errors import RankError

CHUNK_BYTES = 4 << 20
"""What is summed at a time; the next chunk is spread while this one crosses."""

DEPTH = 4
"""Chunks that are under way at a time."""


@dataclass(eq=False)
class _Chunk:
    """A part of a tensor under way; `piece` is what this rank sums of it."""

    reduction: Reduction
    values: torch.Tensor
    piece: torch.Tensor
    crossing: Pending | Reduction | None


class Hierarchy:
    """Sums tensors in place over `group`, whose ranks come host by host, `neighbours` of each; across hosts by `codec`.

    Without a codec, any dtype, exactly. Every member makes it, and starts the same sums in the same order. Raises
    RankError when the group is not several hosts of equally many ranks.
    """

    def __init__(self, world: World, group: Group, neighbours: int, codec: Codec | None = None) -> None:
        assert group.index is not None
        if neighbours < 2 or group.size % neighbours or group.size == neighbours:
            raise RankError(
                f"{group.size} ranks are not several hosts of {neighbours}",
                place=f"the reduction over ranks {group.ranks}",
                remedy="neighbours=1 reduces over all ranks alike",
            )
        host, place = divmod(group.index, neighbours)
        near = group.ranks[host * neighbours : (host + 1) * neighbours]
        ways = (world.own_group(near), world.own_group(near))
        far = world.own_group(group.ranks[place::neighbours])
        self.feedback, self.block = (codec.feedback, codec.block) if codec is not None else (False, 1)
        self._worker = _Worker(world, ways, far, place, codec)
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, self._worker.started.put, None)

    def start(
        self,
        values: torch.Tensor,
        awaited: str = "a sum",
        *,
        residual: torch.Tensor | None = None,
        slots: Sequence[object] = (),
    ) -> Reduction:
        """Begin to sum `values` [n], contiguous, in place; `residual` is added, then overwritten by what is lost."""
        reduction = Reduction(values.detach(), awaited, residual)
        if not values.numel():
            reduction.complete.set()
        elif values.device.type != "cpu":
            self._worker.on_device(reduction)
        else:
            if not self._threads:
                for work in (self._worker.spread, self._worker.collect):
                    self._threads.append(threading.Thread(target=work, name="sums by host", daemon=True))
                    self._threads[-1].start()
            self._worker.started.put(reduction)
        return reduction

    def close(self) -> None:
        """End the threads, after what was started."""
        self._end()
        for thread in self._threads:
            thread.join(self._worker.world.deadline)
        self._worker.close()


class _Worker:
    """What the threads do; they do not know the object that started them, so that it can go."""

    def __init__(self, world: World, ways: tuple[Group, Group], far: Group, place: int, codec: Codec | None) -> None:
        self.world = world
        self.started: queue.SimpleQueue[Reduction | None] = queue.SimpleQueue()
        self._there, self._back = ways
        self._far, self._place, self._codec = far, place, codec
        self._block = 1 if codec is None else codec.block
        self._sums = None if codec is None else TwoShot(world, far, codec)
        self._crossing: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(DEPTH)
        self._error: BaseException | None = None

    def close(self) -> None:
        """End the sums across hosts."""
        if self._sums is not None:
            self._sums.close()

    def spread(self) -> None:
        """On the first thread: sum each chunk's piece over the host, and send it across."""
        while (reduction := self.started.get()) is not None:
            try:
                with torch.no_grad():
                    self._spread(reduction)
            except BaseException as caught:
                self._fail(reduction, caught)
        self._crossing.put(None)

    def collect(self) -> None:
        """On the second thread: wait for each piece from across, and give it to the neighbours."""
        while (chunk := self._crossing.get()) is not None:
            reduction = chunk.reduction
            try:
                if self._error is not None:
                    raise self._error
                with torch.no_grad():
                    self._collect(chunk)
            except BaseException as caught:
                self._fail(reduction, caught)
            reduction.rounds_left -= 1
            if not reduction.rounds_left:
                reduction.complete.set()
            self._room.release()

    def on_device(self, reduction: Reduction) -> None:
        """Do all of it at once, on the stream of the caller: for devices that compute beside the host."""
        values, residual = reduction.values, reduction.residual
        piece, slot = self._sum_near(values, reduction.awaited)
        if slot.stop > slot.start and self._codec is not None:
            owed = None if residual is None else residual[slot]
            own = piece[: slot.stop - slot.start]
            by_collectives(self.world, self._far, self._codec, own, reduction.awaited, owed)
        elif slot.stop > slot.start:
            self.world.all_reduce(piece, self._far)
        self._collect(_Chunk(reduction, values, piece, None))
        reduction.complete.set()

    def _fail(self, reduction: Reduction, error: BaseException) -> None:
        self._error = self._error or error
        reduction.error = self._error
        reduction.complete.set()

    def _spread(self, reduction: Reduction) -> None:
        if self._error is not None:
            raise self._error
        size = CHUNK_BYTES // reduction.values.element_size()
        parts = reduction.values.split(size)
        reduction.rounds_left = len(parts)
        residuals = [None] * len(parts) if reduction.residual is None else reduction.residual.split(size)
        for values, residual in zip(parts, residuals, strict=True):
            self._room.acquire()
            piece, slot = self._sum_near(values, reduction.awaited)
            own = piece[: slot.stop - slot.start]
            crossing: Pending | Reduction | None = None
            if own.numel() and self._sums is not None:
                owed = None if residual is None else residual[slot]
                crossing = self._sums.start(own, reduction.awaited, residual=owed)
            elif own.numel():
                crossing = self.world.start_all_reduce(own, self._far, awaited=reduction.awaited)
            self._crossing.put(_Chunk(reduction, values, piece, crossing))

    def _sum_near(self, values: torch.Tensor, awaited: str) -> tuple[torch.Tensor, slice]:
        """Return this rank's piece of the host's sum, padded to the length of all pieces, and where it lies."""
        number, count = self._there.size, values.numel()
        each = -(-count // (number * self._block)) * self._block
        out = values.new_zeros(number * each)
        out[:count] = values
        into = torch.empty_like(out)
        call = lambda: dist.all_to_all_single(into, out, group=self._there.handle, async_op=True)  # noqa: E731
        self._wait(call, self._there, awaited, (into, out))
        start = min(self._place * each, count)
        return into.view(number, each).sum(0), slice(start, min(start + each, count))

    def _collect(self, chunk: _Chunk) -> None:
        if chunk.crossing is not None:
            chunk.crossing.wait()
        whole = chunk.piece.new_empty(self._back.size * chunk.piece.numel())
        call = lambda: dist.all_gather_single(  # noqa: E731
            whole, chunk.piece, group=self._back.handle, async_op=True
        )
        self._wait(call, self._back, chunk.reduction.awaited, (whole, chunk.piece))
        chunk.values.copy_(whole[: chunk.values.numel()])

    def _wait(self, call: Any, group: Group, awaited: str, keep: object) -> None:
        self.world.begin(call, awaited, self.world.others(group), keep).wait()
