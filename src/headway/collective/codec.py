"""Codec: how float32 gradients are written on the wire: as they are, in 16 bits, or in 8 with a scale for each block.

    fp16   [ factor | value value value ... ]            a power of two for the whole message, so that nothing over- or
                                                         underflows: the largest value becomes 2^14 to 2^15
    bf16   [ value value value ... ]
    int8   [ scale scale ... | 512 values | 512 values | ...]     value = scale * code, code from -127 to 127

NaN and infinity arrive as such: 16 bits can say them, and a block of int8 that holds one has a negative scale, values
up to 120 and three codes of its own. All is done by a few whole-tensor operations, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

BLOCK = 512
"""Values of int8 that share a scale."""

TINY = 2.0**-100
"""Blocks whose largest value is below this are written as if it were this: their scale would not be a normal number."""

SUBNORMAL = 2.0**-126
"""Below this float32 has fewer digits, and some processors take it as zero."""

HEADER_BYTES = 16

INFINITE, MINUS_INFINITE, NAN = 125, -125, -128
SPECIAL = 120  # the largest code of a finite value in a block with one of these


class Codec(Protocol):
    """Writes float32 values [n] into a message of bytes [m] and back. Frozen: what it works in is passed in.

    `block` values are written together, so parts of a tensor best begin at a multiple of it; `scratch` is float32 of
    at least n values (rounded up to a block) that may be overwritten.
    """

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def block(self) -> int: ...

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


@dataclass(frozen=True)
class Int8:
    """A code of 8 bits for each value, and a float32 scale for each block of 512: 1.008 bytes a value.

    The error is at most half a code, 1/254 of the block's largest value. Dettmers et al. 2022, "8-bit Optimizers via
    Block-wise Quantization".
    """

    name: str = "int8"
    exact: bool = False
    block: int = BLOCK

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` values."""
        return -(-count // BLOCK) * (BLOCK + 4)

    def encode(self, values: torch.Tensor, message: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write `values` into `message`."""
        scales, codes = self._parts(message)
        full = values.numel() // BLOCK
        whole, rest = values[: full * BLOCK], values[full * BLOCK :]
        self._encode(whole.view(full, BLOCK), scales[:full], codes[:full], scratch[: full * BLOCK].view(full, BLOCK))
        if rest.numel():
            padded = torch.zeros(1, BLOCK, device=values.device)
            padded[0, : rest.numel()] = rest
            self._encode(padded, scales[full:], codes[full:], torch.empty_like(padded))

    def decode(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Overwrite `values` by what `message` says."""
        scales, codes = self._parts(message)
        full = values.numel() // BLOCK
        self._decode(scales[:full], codes[:full], values[: full * BLOCK].view(full, BLOCK))
        rest = values[full * BLOCK :]
        if rest.numel():
            padded = torch.empty(1, BLOCK, device=values.device)
            self._decode(scales[full:], codes[full:], padded)
            rest.copy_(padded[0, : rest.numel()])

    def accumulate(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add what `message` says to `values`."""
        work = scratch[: values.numel()]
        self.decode(message, work, scratch)
        values.add_(work)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be from what arrives."""
        padded = torch.zeros(-(-values.numel() // BLOCK) * BLOCK, device=values.device)
        padded[: values.numel()] = values
        rows = padded.view(-1, BLOCK)
        finite = torch.isfinite(rows)
        largest = torch.where(finite, rows, 0.0).abs().amax(1, keepdim=True).clamp(min=TINY)
        codes = torch.where(finite.all(1, keepdim=True), 127.0, float(SPECIAL))
        return (0.5001 * largest / codes).expand(rows.shape).reshape(-1)[: values.numel()]

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales [rows, 1] and the codes [rows, 512] of a message."""
        rows = message.numel() // (BLOCK + 4)
        return message[: 4 * rows].view(torch.float32).view(rows, 1), message[4 * rows :].view(torch.int8).view(
            rows, BLOCK
        )

    def _encode(self, rows: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, work: torch.Tensor) -> None:
        if not rows.shape[0]:
            return
        largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
        torch.mul(largest.clamp_(min=TINY), _below(127), out=scales)
        torch.mul(rows, scales.reciprocal(), out=work)
        codes.copy_(work.round_())
        if not bool(torch.isfinite(largest.sum() * 0.0)):
            odd = (~torch.isfinite(largest[:, 0])).nonzero()[:, 0]
            scales[odd], codes[odd] = _special(rows[odd])

    def _decode(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        if not scales.shape[0]:
            return
        torch.mul(codes, scales, out=out)
        if bool((scales < 0).any()):
            odd = (scales[:, 0] < 0).nonzero()[:, 0]
            told = codes[odd]
            values = told * -scales[odd]
            values[told == INFINITE] = torch.inf
            values[told == MINUS_INFINITE] = -torch.inf
            values[told == NAN] = torch.nan
            out[odd] = values


def _special(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, negative, and codes of blocks [rows, 512] that hold NaN or infinity."""
    finite = torch.where(torch.isfinite(rows), rows, 0.0)
    scales = finite.abs().amax(1, keepdim=True).clamp_(min=TINY) * _below(SPECIAL)
    codes = (finite / scales).round_()
    codes[rows == torch.inf] = INFINITE
    codes[rows == -torch.inf] = MINUS_INFINITE
    codes[rows.isnan()] = NAN
    return -scales, codes.to(torch.int8)


def _below(codes: int) -> float:
    """Return a float32 just under 1 / codes: codes * (largest * it) then never exceeds the largest, nor overflows."""
    return (1.0 - 2.0**-22) / codes


def _finite_max(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude among the finite values, 0 for none."""
    finite = torch.where(torch.isfinite(values), values, 0.0)
    return finite.abs().amax() if finite.numel() else finite.new_zeros(())


CODECS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Exact(), BFloat16(), Float16(), Int8())}
)
