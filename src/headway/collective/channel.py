"""Channel: tensors from one stage to another, shapes and dtypes agreed first; sends never block.

A message is a header and what does not go with it, each in its own right on the wire:

    header     micro-batch, dtypes and shapes, length of the note; behind it the values, where there is room for them
    overflow   what did not fit in the header: long descriptions, long notes
    tensor 0.. as they lie in memory

Each part costs both ends a call of gloo's, so values travel with the header unless they are large. How much room the
receiver keeps behind a header is known to both ends: as much as the message LAG before it had values. A receiver that
knows the signature of large values posts them ahead, so that they travel while it computes. A part's tag is made of
its signature too: a tensor that differs from what is expected never arrives in a buffer that does not fit it (gloo
would end the process), and the header, which always arrives, says what comes instead.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from headway.collective.sends import Sends
from headway.collective.world import PeerError, Pending, World
from headway.errors import RankError

Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

# Fixed: these numbers go over the wire.
DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2),
)
CODES = MappingProxyType({dtype: code for code, dtype in enumerate(DTYPES)})

HEADER_BYTES = 512
# micro-batch, number of tensors; bytes of description, note, values; whether those are behind; mark of the batch
FIXED = struct.Struct("<IIIqq?I")
ALIGNED = 64  # bytes: behind a header each tensor begins at a multiple of it
SMALL_BYTES = 128  # values up to this many bytes always travel behind the header
EAGER_BYTES = 1 << 19  # larger ones never do
LAG = 4  # a message has room behind its header for the values of the message that was so many before it
MAX_TAG_BASE = 1 << 10
MICRO_BITS, KIND_BITS = 9, 12
HEADER_KIND, OVERFLOW_KIND, FIRST_TENSOR_KIND = 0, 1, 2


def signature_of(tensors: Sequence[torch.Tensor]) -> Signature:
    """Return the dtypes and shapes of these tensors."""
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


@lru_cache(maxsize=4096)
def _describe(signature: Signature) -> tuple[bytes, int, int]:
    """Return a signature's bytes on the wire, the tag kind of its tensors, and how many bytes they take in a row."""
    parts = []
    for dtype, shape in signature:
        if dtype not in CODES:
            raise TypeError(f"a tensor of {dtype} cannot be sent")
        parts.append(struct.pack(f"<BB{len(shape)}q", CODES[dtype], len(shape), *shape))
    description = b"".join(parts)
    kind = FIRST_TENSOR_KIND + zlib.crc32(description) % ((1 << KIND_BITS) - FIRST_TENSOR_KIND)
    return description, kind, sum(_padded(dtype.itemsize * prod(shape)) for dtype, shape in signature)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


@lru_cache(maxsize=4096)
def _parse(description: bytes) -> Signature:
    signature, at = [], 0
    while at < len(description):
        code, dims = description[at], description[at + 1]
        shape = struct.unpack_from(f"<{dims}q", description, at + 2)
        signature.append((DTYPES[code], shape))
        at += 2 + 8 * dims
    return tuple(signature)


def _written(signature: Signature) -> str:
    """Write a signature for a person: `float32 [8, 32], int64 []`."""
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in signature) or "nothing"


class _Arrival:
    """A message that is awaited: its signature when it is known, and the tensors that were posted for it."""

    __slots__ = ("receives", "signature", "tensors")

    def __init__(self, signature: Signature | None) -> None:
        self.signature = signature
        self.tensors: list[torch.Tensor] = []
        self.receives: list[Pending] = []


class _Header(NamedTuple):
    """A header that has come, and the buffer in which the values lie behind it."""

    start: bytes
    buffer: torch.Tensor


def _places(buffer: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
    """Give the places of tensors behind a header."""
    places, at = [], HEADER_BYTES
    for dtype, shape in signature:
        length = dtype.itemsize * prod(shape)
        places.append(buffer[at : at + length].view(dtype).view(shape))
        at += _padded(length)
    return places


class Channel:
    """One directed edge between two ranks.

    `tag_base` (0..1023) is the edge's own number: no two channels between the same two ranks share it, and both ends
    name the same. Tensors must not be written in place after `send` until the message has gone (`flush`).
    """

    def __init__(self, world: World, source_rank: int, target_rank: int, tag_base: int) -> None:
        if not 0 <= tag_base < MAX_TAG_BASE:
            raise ValueError(f"tag_base {tag_base} is not in 0..{MAX_TAG_BASE - 1}")
        if source_rank == target_rank or world.rank not in (source_rank, target_rank):
            raise ValueError(f"rank {world.rank} has no end of a channel {source_rank} -> {target_rank}")
        self.world = world
        self.source_rank = source_rank
        self.target_rank = target_rank
        self.tag_base = tag_base
        self.name = f"channel {source_rank}->{target_rank}"
        self._group = world.everyone
        self._peer = target_rank if world.rank == source_rank else source_rank
        self._sends = Sends(self.name)
        self._eager_bytes = EAGER_BYTES if world.device.type == "cpu" else SMALL_BYTES
        self._rooms = deque([SMALL_BYTES] * LAG)  # behind the headers of the next messages, the same on both ends
        # Receiving end. Headers arrive in the order of the sends, whatever micro-batch they are of.
        self._posted_headers: deque[tuple[torch.Tensor, Pending]] = deque()
        self._owed = 0  # headers to be awaited whose room is not known yet
        self._free_headers: list[torch.Tensor] = []  # with room for small values
        self._headers: dict[int, deque[_Header]] = {}
        self._arrivals: dict[int, deque[_Arrival]] = {}
        self._unused: dict[tuple[int, Signature | None], deque[_Arrival]] = {}  # posted, but others came

    # ---- sending end

    def send(self, micro: int, tensors: Sequence[torch.Tensor], note: bytes = b"", *, mark: int = 0) -> None:
        """Start sending the tensors and the note of a micro-batch, and return; what was sent is let go when done.

        The receiver refuses another `mark` (0 to 2^32 - 1) than its own.
        Raises PeerError when an earlier message failed, TypeError for a tensor that cannot be sent.
        """
        if self.world.rank != self.source_rank:
            raise ValueError(f"rank {self.world.rank} is the receiving end of {self.name}")
        flat = [self._sendable(tensor) for tensor in tensors]
        description, kind, size = _describe(signature_of(flat))
        self._rooms.append(self._room(size))
        behind = size <= self._rooms.popleft()
        header = torch.empty(HEADER_BYTES + size * behind, dtype=torch.uint8)
        start = FIXED.pack(micro, len(flat), len(description), len(note), size, behind, mark) + description + note
        content: Any = header.numpy()
        memoryview(content)[: min(len(start), HEADER_BYTES)] = start[:HEADER_BYTES]
        if behind:
            for tensor, place in zip(flat, _places(header, signature_of(flat)), strict=True):
                place.copy_(tensor)
        self._post_send(header, micro, HEADER_KIND, "header")
        if len(start) > HEADER_BYTES:
            overflow = torch.frombuffer(bytearray(start[HEADER_BYTES:]), dtype=torch.uint8)
            self._post_send(overflow, micro, OVERFLOW_KIND, "description")
        if not behind:
            for tensor in flat:
                if tensor.numel():
                    self._post_send(tensor.contiguous(), micro, kind, "tensors")

    def flush(self) -> None:
        """Wait until every message has gone. Raises PeerError when one could not go within the deadline."""
        self._sends.wait()

    @property
    def under_way(self) -> int:
        """Return how many parts of messages are still being sent."""
        return len(self._sends)

    # ---- receiving end

    def post(self, micro: int, signature: Signature | None = None) -> None:
        """Expect the message of a micro-batch; with its signature its tensors travel at once, without a round trip."""
        self._check_receiving()
        arrival = _Arrival(signature)
        self._post_header()
        if signature is not None:
            _, kind, size = _describe(signature)
            if size > self._eager_bytes:  # else it may come behind its header
                self._post_tensors(arrival, micro, signature, kind)
        self._arrivals.setdefault(micro, deque()).append(arrival)

    def receive(self, micro: int, *, mark: int = 0) -> tuple[list[torch.Tensor], bytes]:
        """Return the tensors and the note of a micro-batch, in any order of micro-batches.

        Raises PeerError when the sender is lost or the deadline passes, RankError when it gave another mark.
        """
        self._check_receiving()
        if not self._arrivals.get(micro):
            self.post(micro)
        header = self._header_of(micro)
        arrival = self._arrivals[micro].popleft()
        _, count, description_bytes, note_bytes, size, behind, theirs = FIXED.unpack_from(header.start)
        body = header.start[FIXED.size : FIXED.size + description_bytes + note_bytes]
        if len(body) < description_bytes + note_bytes:
            rest = torch.empty(description_bytes + note_bytes - len(body), dtype=torch.uint8)
            self._post_receive(rest, micro, OVERFLOW_KIND, "description").wait()
            body += rest.numpy().tobytes()
        sent = _parse(body[:description_bytes])
        self._check(micro, sent, count, theirs == mark)
        if arrival.tensors and arrival.signature != sent:  # shapes may depend on values
            self._unused.setdefault((micro % (1 << MICRO_BITS), arrival.signature), deque()).append(arrival)
            arrival = _Arrival(sent)
        note = body[description_bytes:]
        if behind:
            return self._take(header.buffer, sent, size), note
        self._let_go(header.buffer)
        if len(arrival.tensors) != len(sent):
            self._post_tensors(arrival, micro, sent, _describe(sent)[1])
        for receive in arrival.receives:
            receive.wait()
        return arrival.tensors, note

    # ---- parts

    def _room(self, size: int) -> int:
        """Say how much room is kept for the values of a message when one had so many bytes of them."""
        return size if SMALL_BYTES < size <= self._eager_bytes else SMALL_BYTES

    def _header_of(self, micro: int) -> _Header:
        """Return this micro-batch's header; those of others that come first are kept for later."""
        while not self._headers.get(micro):
            if not self._posted_headers:
                self._post_header()
            buffer, pending = self._posted_headers.popleft()
            try:
                pending.wait()
            except PeerError as error:
                error.place = f"waiting for micro-batch {micro} on {self.name}{self._others()}; {error.place}"
                raise
            start = buffer[:HEADER_BYTES].numpy().tobytes()
            number, *_, size, _, _ = FIXED.unpack_from(start)
            self._rooms.append(self._room(size))
            if self._owed:
                self._post_header(0)
            self._headers.setdefault(number, deque()).append(_Header(start, buffer))
        return self._headers[micro].popleft()

    def _take(self, buffer: torch.Tensor, signature: Signature, size: int) -> list[torch.Tensor]:
        """Give the tensors that lie behind a header; as they lie there, if they fill most of the room."""
        places = _places(buffer, signature)
        if 2 * size > len(buffer) - HEADER_BYTES and self.world.device.type == "cpu":
            return [place.data for place in places]  # .data: in-place calls on one are no news for the others
        tensors = [place.to(self.world.device, copy=True) for place in places]
        self._let_go(buffer)
        return tensors

    def _let_go(self, buffer: torch.Tensor) -> None:
        if len(buffer) == HEADER_BYTES + SMALL_BYTES:
            self._free_headers.append(buffer)

    def _others(self) -> str:
        came = sorted(micro for micro, headers in self._headers.items() if headers)
        return f" (came instead: micro-batch {', '.join(map(str, came))})" if came else ""

    def _check(self, micro: int, sent: Signature, count: int, alike: bool) -> None:
        if len(sent) == count and alike:
            return
        raise RankError(
            f"rank {self.source_rank} sent {_written(sent)} for micro-batch {micro}, of a batch of other shapes than "
            f"rank {self.target_rank} has",
            place=self.name,
            remedy="all ranks iterate over the same global batches: model.batches(loader), model.share(batch)",
        )

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(f"a tensor that is {'meta' if tensor.is_meta else tensor.layout} cannot be sent")
        return tensor.detach().resolve_conj().resolve_neg()

    def _check_receiving(self) -> None:
        if self.world.rank != self.target_rank:
            raise ValueError(f"rank {self.world.rank} is the sending end of {self.name}")

    def _post_header(self, more: int = 1) -> None:
        """Await so many headers more, as soon as it is known how much room the next ones need."""
        self._owed += more
        while self._owed and self._rooms:
            self._owed -= 1
            room = self._rooms.popleft()
            spare = self._free_headers and room == SMALL_BYTES
            buffer = self._free_headers.pop() if spare else torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
            self._posted_headers.append((buffer, self._post_receive(buffer, 0, HEADER_KIND, "header")))

    def _post_tensors(self, arrival: _Arrival, micro: int, signature: Signature, kind: int) -> None:
        spare = self._unused.get((micro % (1 << MICRO_BITS), signature))
        if spare:  # still awaited under the same tag
            other = spare.popleft()
            arrival.tensors, arrival.receives = other.tensors, other.receives
            return
        for dtype, shape in signature:
            tensor = torch.empty(shape, dtype=dtype, device=self.world.device)
            arrival.tensors.append(tensor)
            if tensor.numel():
                arrival.receives.append(self._post_receive(tensor, micro, kind, "tensors"))

    def _tag(self, micro: int, kind: int) -> int:
        if kind == HEADER_KIND:
            micro = 0
        return (self.tag_base << MICRO_BITS | micro % (1 << MICRO_BITS)) << KIND_BITS | kind

    def _post_send(self, tensor: torch.Tensor, micro: int, kind: int, part: str) -> None:
        send = self._start(self._group.handle.send, tensor, micro, kind, f"rank {self._peer} to take the {part}")
        self._sends.add(send, tensor.nbytes)

    def _post_receive(self, tensor: torch.Tensor, micro: int, kind: int, part: str) -> Pending:
        return self._start(self._group.handle.recv, tensor, micro, kind, f"the {part}")

    def _start(self, call: Callable[..., Any], tensor: torch.Tensor, micro: int, kind: int, awaited: str) -> Pending:
        where = awaited if kind == HEADER_KIND else f"{awaited} of micro-batch {micro} on {self.name}"
        peers = (self._peer,)
        tag = self._tag(micro, kind)
        return self.world.begin(lambda: call([tensor], self._peer, tag), where, peers, tensor, message=True)
