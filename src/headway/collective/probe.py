"""Measures what lies between ranks: latency and bandwidth of messages, the rate of an all-reduce, codecs' own work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from headway.collective.channel import Channel, signature_of
from headway.collective.codec import CODECS, Codec
from headway.collective.pieces import lost
from headway.collective.world import World

TAG_BASE = 1023  # the last one: no edge of a model has it
SMALL_BYTES = 1 << 10
LARGE_BYTES = 1 << 20
CODEC_VALUES = 1 << 18


def measure_link(world: World, ranks: Sequence[int], *, seconds: float = 0.3) -> tuple[float, float]:
    """Return (latency in seconds, bandwidth in bytes per second) of messages between the ranks of `ranks`.

    Each rank sends to the next and back, one pair after the other: the best of several tries, as other work on the
    machine only ever adds, and of all pairs the slowest. Every rank of the world calls it and gets the same answer; it
    takes about `seconds` in all. One rank alone: (0, infinity).
    """
    pairs = list(zip(ranks, ranks[1:], strict=False))
    worst = (0.0, float("inf"))
    if pairs:
        each = seconds / (2 * len(pairs))
        for pair in pairs:
            if world.rank in pair:
                there, back = Channel(world, *pair, TAG_BASE), Channel(world, pair[1], pair[0], TAG_BASE)
                first = world.rank == pair[0]
                small = _half_round(there, back, first, SMALL_BYTES, each)
                large = _half_round(there, back, first, LARGE_BYTES, each)
                # On a busy machine the small message may have been the unlucky one: at most half is taken for latency.
                bandwidth = (LARGE_BYTES - SMALL_BYTES) / max(large - small, large / 2, 1e-9)
                worst = (max(worst[0], small), min(worst[1], bandwidth))
    answers = world.gather_objects(worst)
    return max(latency for latency, _ in answers), min(bandwidth for _, bandwidth in answers)


def measure_codecs(world: World, *, seconds: float = 0.02) -> dict[str, float]:
    """Return the seconds that each codec works for a byte of float32 that is reduced: written, added up, read.

    Every rank calls it, so that all are at work at the same time, and gets the same answer, the slowest one's.
    """
    mine = {name: _codec_seconds(world, codec, seconds) for name, codec in CODECS.items() if not codec.exact}
    answers = world.gather_objects(mine)
    return {name: max(answer[name] for answer in answers) for name in mine}


def _codec_seconds(world: World, codec: Codec, seconds: float) -> float:
    values = torch.randn(CODEC_VALUES, device=world.device)
    scratch, residual = torch.empty_like(values), torch.empty_like(values)
    message = torch.empty(codec.wire_bytes(CODEC_VALUES), dtype=torch.uint8, device=world.device)

    def there_and_back() -> None:
        codec.encode(values, message, scratch)
        if codec.feedback:
            lost(codec, values, message, residual, scratch)
        codec.accumulate(message, values, scratch)
        codec.decode(message, values, scratch)

    there_and_back()
    once = _timed(world, there_and_back)
    return min(_timed(world, there_and_back) for _ in range(_count(once, seconds))) / (4 * CODEC_VALUES)


def _half_round(there: Channel, back: Channel, first: bool, num_bytes: int, seconds: float) -> float:
    """Return the least seconds that a message of this size takes, as half of a round trip; tells both ends."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=there.world.device)
    signature = signature_of([tensor])

    def round_trip(note: bytes = b"") -> bytes:
        out, into = (there, back) if first else (back, there)
        into.post(0, signature)
        if first:
            out.send(0, [tensor], note)
        _, came = into.receive(0)
        if not first:
            out.send(0, [tensor], came)
        return came

    round_trip()  # connects
    once = _timed(there.world, round_trip)
    # The first end says how often, and in the end what it measured: one message each.
    count = int(round_trip(b"%d" % _count(once, seconds)))
    spent = [_timed(there.world, round_trip) for _ in range(count)]
    measured = float(round_trip(b"%.9f" % (min(spent) / 2)))
    (there if first else back).flush()
    return measured


def _count(once: float, seconds: float) -> int:
    return max(3, min(50, int(seconds / max(once, 1e-6)) - 3))


def _timed(world: World, call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - started
