"""World on real processes: groups, objects, deadlines and lost peers."""

from __future__ import annotations

import os
import time

import pytest
import torch

from headway.collective.world import PeerError, World
from headway.errors import RankError
from tests.several.ranks import on_ranks, outcomes_on_ranks


def talk(world: World) -> tuple:
    pairs = [world.group([0, 1]), world.group([1, 2])]
    assert world.group([1, 0]) is pairs[0]
    total = world.all_reduce(torch.tensor([1.0 + world.rank]))
    most = world.all_reduce(torch.tensor([1.0 + world.rank]), op="max")
    mine = [
        world.all_reduce(torch.tensor(10.0**world.rank), group).item() for group in pairs if group.index is not None
    ]
    word = world.broadcast_object({"from": world.rank, "long": "x" * 5000}, source=2)
    everything = world.gather_objects("a" * (world.rank * 100))
    sent = world.broadcast(torch.full((2, 2), float(world.rank)), source=1)
    return total.item(), most.item(), mine, word["from"], [len(text) for text in everything], sent.sum().item()


def test_collectives_on_three_ranks() -> None:
    answers = on_ranks(3, talk)
    for answer in answers:
        assert answer[:2] == (6.0, 3.0)
        assert answer[3:] == (2, [0, 100, 200], 4.0)
    assert [answer[2] for answer in answers] == [[11.0], [11.0, 110.0], [110.0]]


def own_groups(world: World) -> float:
    """Some ranks have made more groups than others when they make one together; others have it to themselves."""
    for ranks in ([0, 1], [0, 1], [1, 2]):
        if world.rank in ranks:
            world.own_group(ranks)
    pair = world.own_group([0, 2]) if world.rank != 1 else None
    together = world.own_group([0, 1, 2])
    if pair is not None:
        world.all_reduce(torch.ones(1), pair)
    return world.all_reduce(torch.tensor([1.0 + world.rank]), together).item()


def test_own_groups_of_ranks_that_have_unequally_many() -> None:
    assert on_ranks(3, own_groups) == [6.0, 6.0, 6.0]


def test_one_process_needs_no_group() -> None:
    world = World()
    tensor = torch.ones(3)
    assert world.all_reduce(tensor) is tensor and tensor.tolist() == [1, 1, 1]
    assert world.broadcast_object("a") == "a" and world.gather_objects(1) == [1]
    assert world.group([0]) is world.everyone
    world.barrier()
    world.close()
    with pytest.raises(RankError, match="world of 1"):
        world.group([0, 1])


def silent_start(world: World) -> None:
    world.all_reduce(torch.ones(1))
    world.group([0, 1])
    world.barrier()


def test_nothing_on_the_terminal() -> None:
    assert [outcome.output for outcome in outcomes_on_ranks(2, silent_start)] == ["", ""]


def one_dies(world: World) -> None:
    world.barrier()
    if world.rank == 2:
        os._exit(7)
    world.all_reduce(torch.ones(100_000))


def test_a_lost_peer_is_named_within_seconds() -> None:
    outcomes = outcomes_on_ranks(3, one_dies, deadline=60.0, timeout=40.0)
    assert outcomes[2].code == 7
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, PeerError), outcome.trace
        assert outcome.error.kind == "lost" and outcome.error.consequence
        assert 2 in outcome.error.peers
        assert "all-reduce" in str(outcome.error)


def one_sleeps(world: World) -> float:
    world.barrier()
    if world.rank == 1:
        time.sleep(4.0)
        return 0.0
    try:
        world.all_reduce(torch.ones(1))
    except PeerError as error:
        assert error.kind == "late" and error.peers == (1,)
        assert "rank 1 did not answer within 1 s" in str(error)
        os._exit(11)
    raise AssertionError("no deadline")


def test_deadline() -> None:
    assert outcomes_on_ranks(2, one_sleeps, deadline=1.0)[0].code == 11


def raises_on_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("this one is the cause")
    world.barrier()


def test_the_harness_shows_the_first_cause() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 1 of 2 failed first(.|\n)*this one is the cause"):
        on_ranks(2, raises_on_one)
