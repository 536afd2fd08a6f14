"""Sharing: which samples of each global batch a copy has, and that all ranks see the same batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from headway.collective.world import Group, World
from headway.errors import BatchError
from headway.planner.plan import shares
from headway.run.microbatch import Share, batch_leaves, cut, num_samples, offsets

CHECKED_BATCHES = 3
"""How many first batches are compared over all ranks: a loader that is not seeded alike differs from the first."""


class Sharing:
    """Shares out global batches among `copies`, and knows a share when it sees it again."""

    def __init__(self, world: World, copies: int, copy: int, group: Group) -> None:
        self.world, self.copies, self.copy, self.group = world, copies, copy, group
        self.checked = 0

    def share(self, batch: Any) -> Any:
        """Take this copy's samples of a global batch.

        Raises BatchError when a leaf has another length, or when ranks see different batches.
        """
        samples = num_samples(batch)
        if self.checked < CHECKED_BATCHES:
            self.checked += 1
            self._same_batch(batch)
        start, stop = offsets(shares(samples, self.copies))[self.copy]
        part = cut(batch, start, stop, keep_shared=True)
        for leaf in batch_leaves(part).values():
            if isinstance(leaf, torch.Tensor):
                leaf.headway_share = Share(start, stop, samples)  # type: ignore[attr-defined]
        return part

    def recognise(self, batch: Any) -> tuple[Any, Share]:
        """Give a share and where it lies in its global batch.

        A batch that did not come from `share` (or lost the mark on the way, by `.to(device)` say) is compared over
        the copies: where all have the same samples it is a global batch and shared out, else they are shares.
        """
        samples = num_samples(batch)
        if self.copies == 1:
            return batch, Share(0, samples, samples)
        for leaf in batch_leaves(batch).values():
            mark = getattr(leaf, "headway_share", None)
            if isinstance(mark, Share) and mark.samples == samples:
                return batch, mark
        seen = self.world.gather_objects((samples, _digest(batch)), self.group)
        if all(entry == seen[0] for entry in seen):
            start, stop = offsets(shares(samples, self.copies))[self.copy]
            return cut(batch, start, stop, keep_shared=True), Share(start, stop, samples)
        start, stop = offsets([count for count, _ in seen])[self.copy]
        return batch, Share(start, stop, sum(count for count, _ in seen))

    def _same_batch(self, batch: Any) -> None:
        seen = self.world.gather_objects(_digest(batch))
        for rank, digest in enumerate(seen):
            if digest != seen[0]:
                raise BatchError(
                    f"ranks 0 and {rank} see different batches",
                    place="the batches of this script's loader",
                    remedy="seed the loader's shuffling alike on all ranks (generator=torch.Generator()"
                    ".manual_seed(0)), or iterate over model.batches(loader)",
                )


def _digest(batch: Any) -> int:
    """Sum up the content of a batch in 32 bits."""
    value = 0
    for leaf in batch_leaves(batch).values():
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().as_strided((leaf.numel(),), (1,))  # one element may have any stride
            content = flat.view(torch.uint8).numpy()
            value = zlib.crc32(content.tobytes(), value)
    return value
