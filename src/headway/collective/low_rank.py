"""LowRank: sums matrices through factors of a low rank, orthogonal ones; what they leave out comes later.

    M [n, m]     the gradient and what was left out before               each rank's own
    P [n, r]     M Q, summed over the ranks, made orthonormal            the same on all
    Q [m, r]     M^T P, summed                                           the same on all, kept for the next step
    P Q^T        overwrites the gradient, and M - P (M^T P)^T is kept: this rank's part of what was left out

Vectors, and matrices that the factors would not make at least half as large, are summed exactly, in the message of the
P. Two messages a bucket, one bucket after the other on a thread of its own, so their order is the same everywhere.
Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization".
"""

from __future__ import annotations

import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch

from headway.collective.bucket import Slot
from headway.collective.codec import CODECS
from headway.collective.two_shot import Reduction, TwoShot
from headway.collective.world import Group, World
from headway.planner.wire import factors

Sum = Callable[[torch.Tensor, str], object]
Job = tuple[Reduction, Sequence[Slot]]


class LowRank:
    """Sums buckets of float32 in place over the ranks of `group`, matrices through factors of `rank` columns.

    Every member makes it, and starts the same sums in the same order. On the CPU a thread does the work. `bases` are
    the Q by parameter name. All ranks end with the same bits where their processors compute alike.
    """

    feedback = True
    block = 1

    def __init__(self, world: World, group: Group, rank: int) -> None:
        self.rank = rank
        self.bases: dict[str, torch.Tensor] = {}
        self._world, self._group = world, group
        self._sums = TwoShot(world, group, CODECS["fp32"])
        self._started: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._started.put, None)

    def start(
        self, values: torch.Tensor, awaited: str = "a sum", *, residual: torch.Tensor | None, slots: Sequence[Slot]
    ) -> Reduction:
        """Begin to sum `values` (float32 [n], contiguous), where `slots` lie, in place; add and overwrite `residual`.

        A matrix with NaN or infinity becomes NaN as a whole, and leaves nothing behind.
        """
        reduction = Reduction(values.detach(), awaited, residual)
        if values.device.type != "cpu":
            sum_on_device: Sum = lambda message, _: self._world.all_reduce(message, self._group)  # noqa: E731
            reduce_bucket(reduction, slots, self.rank, self.bases, sum_on_device)
            reduction.complete.set()
            return reduction
        if self._thread is None:
            sums = self._sums
            sum_on_cpu: Sum = lambda message, awaited: sums.start(message, awaited).wait()  # noqa: E731
            work = (self._started, self.rank, self.bases, sum_on_cpu)
            self._thread = threading.Thread(target=_run, args=work, name="low-rank sums", daemon=True)
            self._thread.start()
        self._started.put((reduction, tuple(slots)))
        return reduction

    def close(self) -> None:
        """End the threads, after what was started."""
        self._end()
        if self._thread is not None:
            self._thread.join(self._world.deadline)
        self._sums.close()


def _run(started: queue.SimpleQueue[Job | None], rank: int, bases: dict[str, torch.Tensor], sum_up: Sum) -> None:
    """Work until None is taken from the queue. After a failure every sum fails with the same error."""
    error: BaseException | None = None
    while (job := started.get()) is not None:
        reduction, slots = job
        if error is None:
            try:
                with torch.no_grad():
                    reduce_bucket(reduction, slots, rank, bases, sum_up)
            except BaseException as caught:
                error = caught
        reduction.error = error
        reduction.complete.set()


def reduce_bucket(
    reduction: Reduction, slots: Sequence[Slot], rank: int, bases: dict[str, torch.Tensor], sum_up: Sum
) -> None:
    """Sum one bucket: `sum_up(message, awaited)` sums float32 [n] in place over the ranks."""
    values, residual = reduction.values, reduction.residual
    if residual is not None:
        values.add_(residual)
    sizes = {slot.name: found for slot in slots if (found := factors(tuple(slot.parameter.shape), rank))}
    low = [slot for slot in slots if slot.name in sizes]
    plain = [slot.place_in(values) for slot in slots if slot.name not in sizes]
    matrices = [slot.place_in(values).reshape(sizes[slot.name][:2]) for slot in low]
    lefts = [
        matrix @ _basis(slot.name, sizes[slot.name], bases, matrix) for slot, matrix in zip(low, matrices, strict=True)
    ]
    summed = _summed([*plain, *lefts], sum_up, reduction.awaited)
    for part, total in zip(plain, summed, strict=False):
        part.copy_(total)
    if not low:
        if residual is not None:
            residual.zero_()
        return
    finite = [bool(total.isfinite().all()) for total in summed[len(plain) :]]
    lefts = [
        torch.linalg.qr(total)[0] if fine else torch.zeros_like(total)
        for total, fine in zip(summed[len(plain) :], finite, strict=True)
    ]
    rights = [
        matrix.T @ left if fine else matrix.new_zeros(matrix.shape[1], left.shape[1])
        for matrix, left, fine in zip(matrices, lefts, finite, strict=True)
    ]
    if residual is not None:
        residual.zero_()
        for slot, matrix, left, right, fine in zip(low, matrices, lefts, rights, finite, strict=True):
            if fine:
                left_out = torch.addmm(matrix, left, right.T, alpha=-1.0)
                slot.place_in(residual).copy_(left_out.view(slot.parameter.shape))
    rights = _summed(rights, sum_up, reduction.awaited)
    for slot, left, right, fine in zip(low, lefts, rights, finite, strict=True):
        slot.place_in(values).copy_(
            (left @ right.T).view(slot.parameter.shape) if fine else left.new_full((), torch.nan)
        )
        bases[slot.name] = right


def _basis(
    name: str, size: tuple[int, int, int], bases: Mapping[str, torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """Return orthonormal columns [m, r]: what the last step's Q spans, random directions where there is none yet."""
    _, columns, rank = size
    known = bases.get(name)
    if known is None or known.shape != (columns, rank):
        known = like.new_zeros(columns, rank)
    known = known.to(like.device)
    norms = known.norm(dim=0)
    directions = known / norms  # so that tiny gradients do not underflow
    if not bool((norms > 0).all()):  # a column that no gradient reached is no direction
        random = torch.randn(columns, rank, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        directions = torch.where(norms > 0, directions, random.to(like.device))
    return torch.linalg.qr(directions)[0]


def _summed(parts: Sequence[torch.Tensor], sum_up: Sum, awaited: str) -> list[torch.Tensor]:
    """Sum tensors over the ranks in one message; return the sums, in the same shapes."""
    message = torch.cat([part.reshape(-1) for part in parts])
    sum_up(message, awaited)
    return [
        piece.view(part.shape) for piece, part in zip(message.split([p.numel() for p in parts]), parts, strict=True)
    ]
