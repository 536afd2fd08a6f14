"""ExactCheck: every so many steps one bucket is also summed exactly, so that what a codec does to it is known.

Buckets take turns; of a large one a stretch, another each time, so that a slow link is not held up for long. The error
is that of the sum which the optimizer sees, beside the exact sum of this step's gradients: the norm of the difference
over the norm of the sum. Where gradients of the ranks cancel, a codec that is good for each of them may be bad for
their sum; then the next better codec takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from headway.collective.bucket import Bucket
from headway.collective.world import Group, Pending, World
from headway.journal import CodecChecked

EVERY = 100
"""Steps from one check to the next."""

MOST_VALUES = 1 << 20
"""Values that are summed exactly in one check."""

LIMITS: Mapping[str, float] = MappingProxyType({"fp16": 0.01, "bf16": 0.05, "int8": 0.1, "int4": 0.5})
"""Errors that lead to the next better codec. On normal values they are 0.0003, 0.0024, 0.01 and 0.16."""

BETTER: Mapping[str, str] = MappingProxyType({"int4": "int8", "int8": "fp16", "fp16": "fp32", "bf16": "fp32"})


class ExactCheck:
    """Checks the buckets of one Reducer in turn; all ranks of the group do it alike. `steps` counts finished steps."""

    def __init__(self, world: World, group: Group, every: int) -> None:
        self.steps = 0
        self._world, self._group, self._every = world, group, every
        self._bucket: Bucket | None = None
        self._stretch = slice(0)
        self._copy: torch.Tensor | None = None
        self._pending: Pending | None = None

    def start(self, bucket: Bucket, values: torch.Tensor, buckets: Sequence[Bucket]) -> None:
        """Begin to sum a copy of `values`, before they are touched, if it is this one's turn among `buckets`."""
        turn, over = divmod(self.steps + 1, self._every)
        if over:
            return
        coded = [each for each in buckets if each.slots and each.slots[0].parameter.dtype == torch.float32]
        if coded[(turn - 1) % len(coded)] is not bucket:
            return
        starts = range(0, values.numel(), MOST_VALUES)
        start = starts[(turn - 1) // len(coded) % len(starts)]
        self._stretch = slice(start, start + MOST_VALUES)
        self._bucket, self._copy = bucket, values[self._stretch].clone()
        awaited = f"{bucket.awaited}, exactly, as a check"
        self._pending = self._world.start_all_reduce(self._copy, self._group, awaited=awaited)

    def finish(self, codec: str, values: torch.Tensor) -> CodecChecked | None:
        """Compare with the sum that the codec gave, `values`; None when no error can be said: NaN, infinity, zero."""
        assert self._pending is not None and self._copy is not None and self._bucket is not None
        self._pending.wait()
        size = torch.linalg.vector_norm(self._copy)
        error = float(torch.linalg.vector_norm(values[self._stretch] - self._copy) / size)
        names = tuple(slot.name for slot in self._bucket.slots)
        self._bucket = self._copy = self._pending = None
        # Rank by rank the bits are the same; the norm of them need not be.
        error = self._world.broadcast_object(error, source=self._group.ranks[0], group=self._group)
        if not 0.0 <= error < float("inf"):
            return None
        limit = LIMITS.get(codec)
        now = BETTER[codec] if limit is not None and error > limit else codec
        return CodecChecked(self.steps + 1, codec, names, error, limit, now)

    @property
    def checking(self) -> Bucket | None:
        """The bucket whose exact sum is under way."""
        return self._bucket
