"""Messages: what FSDP2 asks to gather and to sum, carried by a Courier beside what is being computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from headway.collective.across import Across
from headway.collective.courier import Courier, Delivery
from headway.collective.world import Group

SUMS_AT_A_TIME = 1
"""Blocks whose gradients are on the wire while those of the next one are computed: each takes its memory once more."""


class Arrival(dist.Work):
    """A gather under way, as FSDP2 waits for one."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        super().__init__()
        self.deliveries = deliveries

    def wait(self, timeout: Any = None) -> bool:
        """Wait until all slices have come. Raises PeerError when a rank is lost or late."""
        for delivery in self.deliveries:
            delivery.wait()
        return True


class Gather:
    """Gathers the slices of one module, beside what is being computed."""

    def __init__(self, courier: Courier, group: Group, awaited: str) -> None:
        self.courier, self.group, self.awaited = courier, group, awaited

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the memory that FSDP2 copies its slices into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work:
        """Begin: this rank's slice lies in its part of `output_tensor` already."""
        parts = output_tensor.view(self.group.size, -1)
        with self.courier.together():
            return Arrival([self.courier.spread(parts[rank], rank, self.awaited) for rank in range(self.group.size)])


class Sums:
    """Sums the gradients of one module into slices, beside what is being computed."""

    def __init__(
        self, courier: Courier, group: Group, awaited: str, under_way: list[Sequence[Delivery]], across: Across | None
    ) -> None:
        self.courier, self.group, self.awaited, self.under_way = courier, group, awaited, under_way
        self.started: list[Sequence[Delivery]] = []
        self.across = across
        self.closing = False  # the step's last backward: what all of them came to crosses to other groups
        self.kept: torch.Tensor | None = None  # the sum of this step's earlier backwards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the memory that FSDP2 copies gradients into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Begin to sum; `output_tensor` is complete after `wait`, and no one reads it before."""
        again = bool(self.started)
        self.wait_for(self.started)  # FSDP2 adds a second sum of one backward to the first, there and then
        me = self.group.index
        parts = input_tensor.view(self.group.size, -1)
        assert me is not None
        output_tensor.copy_(parts[me])
        then = None
        if self.across is not None and self.closing:
            if self.kept is not None:
                output_tensor.add_(self.kept)
                self.kept = None
            then = partial(self.across.start, output_tensor, self.awaited)
        elif self.across is not None and self.kept is None:
            self.kept = output_tensor  # in which the caller adds up those that follow
        with self.courier.together():
            deliveries = [
                self.courier.collect(output_tensor, rank, self.awaited, then)
                if rank == me
                else self.courier.collect(parts[rank], rank, self.awaited)
                for rank in range(self.group.size)
            ]
        self.started.append(deliveries)
        self.under_way.append(deliveries)
        if again:
            self.wait_for([deliveries])
        while len(self.under_way) > SUMS_AT_A_TIME:
            self.wait_for([self.under_way.pop(0)])

    def wait(self) -> None:
        """Wait for all that was started."""
        self.wait_for(self.started)
        self.started.clear()

    @staticmethod
    def wait_for(sums: Iterable[Sequence[Delivery]]) -> None:
        """Wait for these deliveries."""
        for deliveries in sums:
            for delivery in deliveries:
                delivery.wait()
