"""Channel between real processes: any tensor, any order, mismatches and losses named, nothing kept too long."""

from __future__ import annotations

import os
import pickle
import random
import time

import pytest
import torch

from headway.collective.channel import DTYPES, EAGER_BYTES, Channel, signature_of
from headway.collective.world import PeerError, World
from headway.errors import RankError
from tests.several.ranks import SOON, on_ranks, outcomes_on_ranks


def random_tensor(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    shape = [rng.choice([0, 1, 2, 3, 5, 17, 130]) for _ in range(rng.randrange(4))]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    tensor = (torch.rand(shape, generator=generator) * 100).to(dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and rng.random() < 0.5 else tensor


def random_messages(seed: int) -> list[tuple[list[torch.Tensor], bytes]]:
    rng = random.Random(seed)
    dtypes = [dtype for dtype in DTYPES if dtype != torch.complex32]
    sizes = [0, 0, 3, 400, 700, 5000]
    return [
        ([random_tensor(rng, rng.choice(dtypes)) for _ in range(rng.randrange(5))], rng.randbytes(rng.choice(sizes)))
        for _ in range(60)
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def any_message(world: World, seed: int) -> int:
    channel = Channel(world, 0, 1, tag_base=5)
    messages = random_messages(seed)
    rng = random.Random(seed + 1)
    if world.rank == 0:
        for micro, (tensors, note) in enumerate(messages):
            channel.send(micro, tensors, note)
        channel.flush()
        return channel.under_way
    order = list(range(len(messages)))
    known = [rng.random() < 0.5 for _ in messages]
    for micro, (tensors, _) in enumerate(messages):
        if known[micro]:
            channel.post(micro, signature_of(tensors))
    rng.shuffle(order)
    for micro in order:
        tensors, note = channel.receive(micro)
        assert note == messages[micro][1]
        assert signature_of(tensors) == signature_of(messages[micro][0])
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert [raw(a) for a in tensors] == [raw(b) for b in messages[micro][0]], (micro, known[micro])
    return 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_tensors_arrive_in_any_order(seed: int) -> None:
    assert on_ranks(2, any_message, seed) == [0, 0]


def both_ways(world: World, count: int) -> float:
    """Both ranks send everything before either receives anything."""
    there, back = Channel(world, 0, 1, 0), Channel(world, 1, 0, 1)
    out, into = (there, back) if world.rank == 0 else (back, there)
    for step in range(2):
        for micro in range(count):
            out.send(micro, [torch.full((64, 1024), float(world.rank + micro + step))], b"n%d" % micro)
        for micro in range(count):
            (tensor,), note = into.receive(micro)
            assert note == b"n%d" % micro
            assert torch.equal(tensor, torch.full((64, 1024), float(1 - world.rank + micro + step)))
    out.flush()
    return out.under_way


def test_64_micro_batches_in_flight_both_ways() -> None:
    assert on_ranks(2, both_ways, 64) == [0, 0]


def sender_lets_go(world: World) -> int:
    channel, back = Channel(world, 0, 1, 0), Channel(world, 1, 0, 1)
    most = 0
    for micro in range(30):
        if world.rank == 0:
            channel.send(micro, [torch.ones(1 << 16)])
            if micro >= 2:
                (answer,), _ = back.receive(micro - 2)
            time.sleep(0.002)
            most = max(most, channel.under_way)
        else:
            (tensor,), _ = channel.receive(micro)
            back.send(micro, [tensor[:1]])
    if world.rank == 0:
        back.receive(28)
        back.receive(29)
    else:
        back.flush()
    return most


def test_sent_tensors_do_not_pile_up() -> None:
    assert on_ranks(2, sender_lets_go)[0] <= 8  # two messages of two parts, and a thread that runs a little later


def behind_headers(world: World) -> list[int]:
    """Count the parts of messages whose size changes."""
    channel = Channel(world, 0, 1, 0)
    parts = []
    for micro, length in enumerate([300] * 6 + [EAGER_BYTES] * 5 + [7] * 6 + [300, 301]):
        if world.rank == 0:
            channel.send(micro, [torch.full((length,), micro, dtype=torch.uint8), torch.tensor([1.5, micro])])
            parts.append(channel.under_way)
            channel.flush()
        else:
            channel.post(micro, None)
            first, second = channel.receive(micro)[0]
            assert first.tolist() == [micro] * length and second.tolist() == [1.5, micro]
            before = second._version
            first.add_(1)  # they may lie in one buffer: autograd must not take this for a change of the other
            assert second._version == before and second.tolist() == [1.5, micro]
    return parts


def test_values_travel_with_the_header_where_there_is_room_and_never_when_they_are_large() -> None:
    """Room is that of the message four before; up to 128 bytes there always is, for more than EAGER_BYTES never."""
    parts = on_ranks(2, behind_headers)[0]
    assert parts == [3] * 4 + [1] * 2 + [3] * 5 + [1] * 6 + [3] * 2


def mismatch(world: World) -> str:
    channel = Channel(world, 0, 1, 3)
    if world.rank == 0:
        channel.send(0, [torch.ones(8, 64)], b"x", mark=7)
        world.barrier()
        return ""
    with pytest.raises(RankError) as caught:
        channel.receive(0)
    world.barrier()
    assert not getattr(caught.value, "consequence", False)
    return str(caught.value)


def test_another_batch_is_refused() -> None:
    text = on_ranks(2, mismatch)[1]
    assert "rank 0 sent float32 [8, 64] for micro-batch 0, of a batch of other shapes than rank 1 has" in text
    assert "channel 0->1" in text


LARGE = EAGER_BYTES // 4 + 1


def other_than_posted(world: World) -> None:
    """Send other shapes than were posted, and later those, for the same micro-batch; gloo must never see a misfit."""
    channel = Channel(world, 0, 1, 3)
    lengths = [2 * LARGE, LARGE, LARGE, 5, 3 * LARGE, LARGE]
    for turn, length in enumerate(lengths):
        if world.rank == 0:
            channel.send(turn % 2, [torch.full((length,), float(turn))])
        else:
            channel.post(turn % 2, ((torch.float32, (LARGE,)),))
            (tensor,), _ = channel.receive(turn % 2)
            assert tensor.shape == (length,) and bool((tensor == turn).all()), turn
    if world.rank == 0:
        channel.flush()


def test_other_shapes_than_posted_arrive() -> None:
    on_ranks(2, other_than_posted)


def dies_while_awaited(world: World) -> None:
    world.barrier()
    channel = Channel(world, 0, 1, 0)
    if world.rank == 0:
        channel.send(0, [torch.ones(100)])
        time.sleep(0.5)
        os._exit(9)
    channel.post(0, ((torch.float32, (100,)),))
    channel.post(1, ((torch.float32, (100,)),))
    channel.receive(0)
    channel.receive(1)


def test_a_sender_that_dies_is_named() -> None:
    outcomes = outcomes_on_ranks(2, dies_while_awaited, deadline=30.0)
    error = outcomes[1].error
    assert outcomes[0].code == 9 and isinstance(error, PeerError)
    assert error.kind == "lost" and error.peers == (0,) and outcomes[1].seconds - outcomes[0].seconds < SOON
    assert "micro-batch 1" in str(error) and "channel 0->1" in str(error)


def never_sends(world: World) -> None:
    channel = Channel(world, 0, 1, 0)
    if world.rank == 0:
        channel.send(7, [torch.ones(1)])
        time.sleep(2.0)
        os._exit(0)
    channel.receive(3)


def test_the_deadline_names_what_was_awaited_and_what_came_instead() -> None:
    error = outcomes_on_ranks(2, never_sends, deadline=1.0)[1].error
    assert isinstance(error, PeerError) and error.kind == "late"
    text = str(error)
    assert "rank 0 did not answer within 1 s" in text
    assert "micro-batch 3 on channel 0->1" in text and "came instead: micro-batch 7" in text
    assert str(pickle.loads(pickle.dumps(error))) == text


def never_takes(world: World) -> None:
    channel = Channel(world, 0, 1, 0)
    if world.rank == 1:
        time.sleep(2.5)
        os._exit(0)
    channel.send(0, [torch.ones(1 << 20)])
    channel.flush()


def test_a_receiver_that_never_takes_is_named() -> None:
    error = outcomes_on_ranks(2, never_takes, deadline=1.0)[0].error
    assert isinstance(error, PeerError) and error.peers == (1,)
    assert "rank 1 to take" in str(error)


def test_misuse() -> None:
    world = World()
    with pytest.raises(ValueError, match="no end of a channel"):
        Channel(world, 1, 2, 0)
    with pytest.raises(ValueError, match="tag_base"):
        Channel(world, 0, 1, 5000)
