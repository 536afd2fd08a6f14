"""Channel: tensors from one stage to another, shapes and dtypes agreed first; sends never block.

A message is a header of fixed size and one part per tensor, each in its own right on the wire:

    header     micro-batch, dtypes and shapes, length of the note, and the values themselves when they are tiny
    overflow   what did not fit in the header: long descriptions, long notes
    tensor 0.. as they lie in memory

A receiver that knows the signature posts all parts ahead, so that they travel while it computes. A part's tag is made
of its signature too: a tensor that differs from what is expected never arrives in a buffer that does not fit it (gloo
would end the process), and the header, which always arrives, says what is wrong.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch

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
FIXED = struct.Struct(
    "<IIIqI"
)  # micro-batch, number of tensors, bytes of description, of note, of values in the header
INLINE_BYTES = 128  # values up to this many bytes travel in the header
LINGER_BYTES = 1 << 20  # of messages that may have gone and are kept all the same, until the next flush
MAX_TAG_BASE = 1 << 10
MICRO_BITS, KIND_BITS = 9, 12
HEADER_KIND, OVERFLOW_KIND, FIRST_TENSOR_KIND = 0, 1, 2


def signature_of(tensors: Sequence[torch.Tensor]) -> Signature:
    """Return the dtypes and shapes of these tensors."""
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


@lru_cache(maxsize=4096)
def _describe(signature: Signature) -> tuple[bytes, int, int]:
    """Return a signature's bytes on the wire, the tag kind of its tensors, and how many bytes the tensors take."""
    parts = []
    for dtype, shape in signature:
        if dtype not in CODES:
            raise TypeError(f"a tensor of {dtype} cannot be sent")
        parts.append(struct.pack(f"<BB{len(shape)}q", CODES[dtype], len(shape), *shape))
    description = b"".join(parts)
    kind = FIRST_TENSOR_KIND + zlib.crc32(description) % ((1 << KIND_BITS) - FIRST_TENSOR_KIND)
    return description, kind, sum(dtype.itemsize * prod(shape) for dtype, shape in signature)


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


class _Sends:
    """Sends under way, with their tensors. gloo's sends cannot be polled, only waited for.

    `wait` does that, and a thread as soon as more than LINGER_BYTES are kept alive: each time that it wakes, whoever
    computes waits for Python's lock.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: deque[tuple[Pending, int]] = deque()
        self._added = self._gone = 0  # bytes; each is written by one thread at a time
        self._draining = threading.Lock()
        self._wake = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, send: Pending, size: int) -> None:
        if self._error is not None:
            raise self._error
        self._under_way.append((send, size))
        self._added += size
        if self._added - self._gone > LINGER_BYTES:
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"sends of {self._name}", daemon=True)
                self._thread.start()

    def __len__(self) -> int:
        return len(self._under_way)

    def wait(self) -> None:
        """Wait until all have gone. Raises what went wrong with any."""
        with self._draining:
            while self._under_way and self._error is None:
                send, size = self._under_way[0]
                try:
                    send.wait()  # each has a deadline
                except BaseException as error:
                    self._error = error
                    break
                self._under_way.popleft()
                self._gone += size
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with suppress(BaseException):  # kept, and raised to whoever sends or waits next
            while self._wake.wait():
                self._wake.clear()
                self.wait()


class _Arrival:
    """A message that is awaited: its signature when it is known, and the tensors that were posted for it."""

    __slots__ = ("receives", "signature", "tensors")

    def __init__(self, signature: Signature | None) -> None:
        self.signature = signature
        self.tensors: list[torch.Tensor] = []
        self.receives: list[Pending] = []


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
        self._sends = _Sends(self.name)
        # Receiving end. Headers arrive in the order of the sends, whatever micro-batch they are of.
        self._posted_headers: deque[tuple[torch.Tensor, Pending]] = deque()
        self._free_headers: list[torch.Tensor] = []
        self._headers: dict[int, deque[bytes]] = {}
        self._arrivals: dict[int, deque[_Arrival]] = {}

    # ---- sending end

    def send(self, micro: int, tensors: Sequence[torch.Tensor], note: bytes = b"") -> None:
        """Start sending the tensors and the note of a micro-batch, and return; what was sent is let go when done.

        Raises PeerError when an earlier message failed, TypeError for a tensor that cannot be sent.
        """
        if self.world.rank != self.source_rank:
            raise ValueError(f"rank {self.world.rank} is the receiving end of {self.name}")
        flat = [self._sendable(tensor) for tensor in tensors]
        description, kind, size = _describe(signature_of(flat))
        inline = b"".join(_bytes_of(tensor) for tensor in flat) if size <= INLINE_BYTES else b""
        header = bytearray(HEADER_BYTES)
        FIXED.pack_into(header, 0, micro, len(flat), len(description), len(note), len(inline))
        body = inline + description + note
        room = HEADER_BYTES - FIXED.size
        header[FIXED.size : FIXED.size + min(len(body), room)] = body[:room]
        self._post_send(torch.frombuffer(header, dtype=torch.uint8), micro, HEADER_KIND, "header")
        if len(body) > room:
            overflow = torch.frombuffer(bytearray(body[room:]), dtype=torch.uint8)
            self._post_send(overflow, micro, OVERFLOW_KIND, "description")
        if size > INLINE_BYTES:
            for tensor in flat:
                if tensor.numel():
                    self._post_send(tensor, micro, kind, "tensors")

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
            if size > INLINE_BYTES:
                self._post_tensors(arrival, micro, signature, kind)
        self._arrivals.setdefault(micro, deque()).append(arrival)

    def receive(self, micro: int) -> tuple[list[torch.Tensor], bytes]:
        """Return the tensors and the note of a micro-batch, in any order of micro-batches.

        Raises PeerError when the sender is lost or the deadline passes, RankError when what came is not what was
        posted.
        """
        self._check_receiving()
        if not self._arrivals.get(micro):
            self.post(micro)
        header = self._header_of(micro)
        arrival = self._arrivals[micro].popleft()
        _, count, description_bytes, note_bytes, inline_bytes = FIXED.unpack_from(header)
        body_bytes = inline_bytes + description_bytes + note_bytes
        body = header[FIXED.size : FIXED.size + body_bytes]
        if body_bytes > len(body):
            rest = torch.empty(body_bytes - len(body), dtype=torch.uint8)
            self._post_receive(rest, micro, OVERFLOW_KIND, "description").wait()
            body += rest.numpy().tobytes()
        sent = _parse(body[inline_bytes : inline_bytes + description_bytes])
        self._check(micro, arrival, sent, count)
        note = body[inline_bytes + description_bytes :]
        if inline_bytes:
            return self._from_inline(sent, body), note
        if len(arrival.tensors) != len(sent):
            self._post_tensors(arrival, micro, sent, _describe(sent)[1])
        for receive in arrival.receives:
            receive.wait()
        return arrival.tensors, note

    # ---- parts

    def _header_of(self, micro: int) -> bytes:
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
            header = buffer.numpy().tobytes()
            self._free_headers.append(buffer)
            self._headers.setdefault(FIXED.unpack_from(header)[0], deque()).append(header)
        return self._headers[micro].popleft()

    def _others(self) -> str:
        came = sorted(micro for micro, headers in self._headers.items() if headers)
        return f" (came instead: micro-batch {', '.join(map(str, came))})" if came else ""

    def _check(self, micro: int, arrival: _Arrival, sent: Signature, count: int) -> None:
        if len(sent) == count and arrival.signature in (None, sent):
            return
        assert arrival.signature is not None
        raise RankError(
            f"rank {self.source_rank} sent {_written(sent)} for micro-batch {micro}, "
            f"rank {self.target_rank} expected {_written(arrival.signature)}",
            place=self.name,
            remedy="the two stages saw batches of different shape, or took different ways through the model",
        )

    def _from_inline(self, signature: Signature, body: bytes) -> list[torch.Tensor]:
        tensors, at = [], 0
        for dtype, shape in signature:
            tensor = torch.empty(shape, dtype=dtype)
            length = tensor.numel() * dtype.itemsize
            if length:
                part = torch.frombuffer(bytearray(body[at : at + length]), dtype=torch.uint8)
                tensor.view(-1).view(torch.uint8).copy_(part)
            tensors.append(tensor.to(self.world.device))
            at += length
        return tensors

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(f"a tensor that is {'meta' if tensor.is_meta else tensor.layout} cannot be sent")
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def _check_receiving(self) -> None:
        if self.world.rank != self.target_rank:
            raise ValueError(f"rank {self.world.rank} is the sending end of {self.name}")

    def _post_header(self) -> None:
        buffer = self._free_headers.pop() if self._free_headers else torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._posted_headers.append((buffer, self._post_receive(buffer, 0, HEADER_KIND, "header")))

    def _post_tensors(self, arrival: _Arrival, micro: int, signature: Signature, kind: int) -> None:
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


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
