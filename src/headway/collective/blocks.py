"""Blocks: float32 in a few bits a value, with a scale for each block of values: int8, int4.

    int8   [ scale scale ... | 512 values | 512 values | ...]              value = scale * code, code from -127 to 127
    int4   [ scale scale ... | 64 bytes of 128 values | ...]               code from -7 to 7, two in a byte

NaN and infinity arrive as such: a block that holds one has a negative scale, three codes for them and fewer for the
rest. All is done by a few whole-tensor operations, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY = 2.0**-100
"""Blocks whose largest value is below this are written as if it were this: their scale would not be a normal number."""

INT8_BLOCK, INT4_BLOCK = 512, 128


@dataclass(frozen=True)
class Blocks:
    """Codes of `bits` bits, and a float32 scale for each `block` of values.

    The error is at most half a code of the block's largest value / `codes`. In a block with NaN or infinity the largest
    finite code is `special`, `infinite` and -`infinite` stand for the infinities, `nan` for NaN. Dettmers et al. 2022,
    "8-bit Optimizers via Block-wise Quantization".
    """

    name: str
    bits: int
    block: int
    codes: int
    special: int
    infinite: int
    nan: int
    feedback: bool = False
    exact: bool = False

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` values."""
        return -(-count // self.block) * self._row_bytes

    def encode(self, values: torch.Tensor, message: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write `values` into `message`."""
        scales, packed = self._parts(message)
        full = values.numel() // self.block
        whole, rest = values[: full * self.block], values[full * self.block :]
        if full:
            rows = whole.view(full, self.block)
            self._encode(rows, scales[:full], packed[:full], scratch[: full * self.block].view(full, self.block))
        if rest.numel():
            padded = torch.zeros(1, self.block, device=values.device)
            padded[0, : rest.numel()] = rest
            self._encode(padded, scales[full:], packed[full:], torch.empty_like(padded))

    def decode(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Overwrite `values` by what `message` says."""
        scales, packed = self._parts(message)
        full = values.numel() // self.block
        if full:
            self._decode(scales[:full], packed[:full], values[: full * self.block].view(full, self.block))
        rest = values[full * self.block :]
        if rest.numel():
            padded = torch.empty(1, self.block, device=values.device)
            self._decode(scales[full:], packed[full:], padded)
            rest.copy_(padded[0, : rest.numel()])

    def accumulate(self, message: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add what `message` says to `values`."""
        work = scratch[: values.numel()]
        self.decode(message, work, scratch)
        values.add_(work)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return how far each value may be from what arrives."""
        padded = torch.zeros(-(-values.numel() // self.block) * self.block, device=values.device)
        padded[: values.numel()] = values
        rows = padded.view(-1, self.block)
        finite = torch.isfinite(rows)
        largest = torch.where(finite, rows, 0.0).abs().amax(1, keepdim=True).clamp(min=TINY)
        codes = torch.where(finite.all(1, keepdim=True), float(self.codes), float(self.special))
        return (0.5001 * largest / codes).expand(rows.shape).reshape(-1)[: values.numel()]

    @property
    def _row_bytes(self) -> int:
        return 4 + self.block * self.bits // 8

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales [rows, 1] and the packed codes [rows, bytes] of a message."""
        rows = message.numel() // self._row_bytes
        scales = message[: 4 * rows].view(torch.float32).view(rows, 1)
        return scales, message[4 * rows :].view(rows, self._row_bytes - 4)

    def _encode(self, rows: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, work: torch.Tensor) -> None:
        largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
        torch.mul(largest.clamp_(min=TINY), _below(self.codes), out=scales)
        torch.mul(rows, scales.reciprocal(), out=work)
        self._pack(work.round_(), packed)
        if not bool(torch.isfinite(largest.sum() * 0.0)):
            odd = (~torch.isfinite(largest[:, 0])).nonzero()[:, 0]
            scales[odd], codes = self._with_special(rows[odd])
            told = packed[odd]
            self._pack(codes, told)
            packed[odd] = told

    def _decode(self, scales: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
        self._unpack(packed, out)
        odd = (scales[:, 0] < 0).nonzero()[:, 0] if bool((scales < 0).any()) else None
        told = None if odd is None else out[odd]
        out.mul_(scales)
        if odd is not None and told is not None:
            values = told * -scales[odd]
            values[told == self.infinite] = torch.inf
            values[told == -self.infinite] = -torch.inf
            values[told == self.nan] = torch.nan
            out[odd] = values

    def _with_special(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales, negative, and codes of blocks [rows, block] that hold NaN or infinity."""
        finite = torch.where(torch.isfinite(rows), rows, 0.0)
        scales = finite.abs().amax(1, keepdim=True).clamp_(min=TINY) * _below(self.special)
        codes = (finite / scales).round_()
        codes[rows == torch.inf] = self.infinite
        codes[rows == -torch.inf] = -self.infinite
        codes[rows.isnan()] = self.nan
        return -scales, codes

    def _pack(self, codes: torch.Tensor, packed: torch.Tensor) -> None:
        """Write whole numbers [rows, block], which may be overwritten, as bytes; NaN becomes any of them."""
        if self.bits == 8:
            packed.view(torch.int8).copy_(codes)
            return
        low, high = codes.chunk(2, dim=1)
        packed.copy_(low.add_(high, alpha=16.0).add_(8.0 * 17.0))  # each from 0 to 15, side by side

    def _unpack(self, packed: torch.Tensor, codes: torch.Tensor) -> None:
        if self.bits == 8:
            codes.copy_(packed.view(torch.int8))
            return
        low, high = codes.chunk(2, dim=1)
        low.copy_(packed & 15)
        high.copy_(packed >> 4)
        codes.sub_(8.0)


def _below(codes: int) -> float:
    """Return a float32 just under 1 / codes: codes * (largest * it) then never exceeds the largest, nor overflows."""
    return (1.0 - 2.0**-22) / codes


INT8 = Blocks("int8", bits=8, block=INT8_BLOCK, codes=127, special=120, infinite=125, nan=-128)
INT4 = Blocks("int4", bits=4, block=INT4_BLOCK, codes=7, special=5, infinite=7, nan=-8, feedback=True)
