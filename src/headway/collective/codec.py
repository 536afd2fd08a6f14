"""Codec: how float32 gradients are written on the wire: as they are, in 16 bits, or in blocks of 8 or 4 (blocks.py).

    fp16   [ factor | value value value ... ]            a power of two for the whole message, so that nothing over- or
                                                         underflows: the largest value becomes 2^14 to 2^15
    bf16   [ value value value ... ]

NaN and infinity arrive as such. All is done by a few whole-tensor operations, on any device. What writes whole matrices
at once is in low_rank.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from headway.collective.blocks import INT4, INT8, TINY

SUBNORMAL = 2.0**-126
"""Below this float32 has fewer digits, and some processors take it as zero."""

HEADER_BYTES = 16


class Codec(Protocol):
    """Writes float32 values [n] into a message of bytes [m] and back. Frozen: what it works in is passed in.

    `block` values are written together, so parts of a tensor best begin at a multiple of it; `scratch` is float32 of
    at least n values (rounded up to a block) that may be overwritten. `feedback`: what rounding loses is too much to
    lose, and is kept and added to the next gradient.
    """

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def block(self) -> int: ...
    @property
    def feedback(self) -> bool: ...

    def wire_bytes(self, count: int) -> int:
        """Return the size of the message that `count` values make, in bytes."""
        ...

    def encode(self, values: torch.Tensor, message: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write `values` into `message`, which has exactly their `wire_bytes`."""
        ...

    def decode(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Overwrite `values` by what `message` says."""
        ...

    def accumulate(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add what `message` says to `values`."""
        ...

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return, for each value, how far what arrives may be from it: the codec's promise, which tests hold it to."""
        ...


@dataclass(frozen=True)
class Exact:
    """float32 as it is: 4 bytes a value."""

    name: str = "fp32"
    exact: bool = True
    block: int = 1
    feedback: bool = False

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` values."""
        return 4 * count

    def encode(self, values: torch.Tensor, message: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write `values` into `message`."""
        message.view(torch.float32).copy_(values)

    def decode(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Overwrite `values` by what `message` says."""
        values.copy_(message.view(torch.float32))

    def accumulate(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add what `message` says to `values`."""
        values.add_(message.view(torch.float32))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be from what arrives."""
        return torch.zeros_like(values)


@dataclass(frozen=True)
class BFloat16:
    """float32 with 8 digits (bits) instead of 24: 2 bytes a value. Values above 3.389e38 become infinite."""

    name: str = "bf16"
    exact: bool = False
    block: int = 1
    feedback: bool = False

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` values."""
        return 2 * count

    def encode(self, values: torch.Tensor, message: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write `values` into `message`."""
        message.view(torch.bfloat16).copy_(values)

    def decode(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Overwrite `values` by what `message` says."""
        values.copy_(message.view(torch.bfloat16))

    def accumulate(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add what `message` says to `values`."""
        values.add_(message.view(torch.bfloat16))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be from what arrives."""
        size = values.abs()
        limit = size * 2.0**-8 + SUBNORMAL
        return torch.where(size > torch.finfo(torch.bfloat16).max, torch.inf, limit)


@dataclass(frozen=True)
class Float16:
    """11 digits (bits) and a factor of the whole message, a power of two: 2 bytes a value.

    A gradient's exponents span less than half precision's 40 binary orders but lie anywhere; torch's own hook sends
    them as they are, divided by the ranks in half precision, and loses what is below 6e-8.
    """

    name: str = "fp16"
    exact: bool = False
    block: int = 1
    feedback: bool = False

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` values."""
        return HEADER_BYTES + 2 * count

    def encode(self, values: torch.Tensor, message: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write `values` into `message`."""
        factor = self._factor(values)
        self._inverse(message).copy_(1.0 / factor)
        torch.mul(values, factor, out=self._halves(message))

    def decode(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Overwrite `values` by what `message` says."""
        values.copy_(self._halves(message)).mul_(self._inverse(message))

    def accumulate(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add what `message` says to `values`."""
        work = scratch[: values.numel()]
        work.copy_(self._halves(message)).mul_(self._inverse(message))
        values.add_(work)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be from what arrives."""
        size = values.abs()
        largest = _finite_max(values).clamp(min=TINY)
        return size * 2.0**-11 + largest * 2.0**-39 + SUBNORMAL

    def _factor(self, values: torch.Tensor) -> torch.Tensor:
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high)
        if not bool(torch.isfinite(largest)):
            largest = _finite_max(values)
        _, exponent = torch.frexp(largest.clamp(min=TINY))  # largest = m * 2^exponent with m in [0.5, 1)
        return torch.ldexp(torch.ones_like(largest), 15 - exponent)

    def _inverse(self, message: torch.Tensor) -> torch.Tensor:
        return message[:4].view(torch.float32)

    def _halves(self, message: torch.Tensor) -> torch.Tensor:
        return message[HEADER_BYTES:].view(torch.float16)


def _finite_max(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude among the finite values, 0 for none."""
    finite = torch.where(torch.isfinite(values), values, 0.0)
    return finite.abs().amax() if finite.numel() else finite.new_zeros(())


_ALL: tuple[Codec, ...] = (Exact(), BFloat16(), Float16(), INT8, INT4)
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})
