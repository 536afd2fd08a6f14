"""What goes wrong on one rank in the middle of a reduction is named on all others, soon, with who and where."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway.collective.across import sharers
from headway.collective.pending import GRACE
from headway.collective.reduce import Reducer
from headway.collective.shard import ShardedReducer
from headway.collective.world import PeerError, World
from tests.several.ranks import SOON, Outcome, outcomes_on_ranks

DEADLINE = 1.0


def trains(world: World, codec: str, fault: str) -> None:
    """Reduce again and again; rank 1 has its accident inside a backward, when others are already waiting."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    reducer = Reducer(world, world.everyone, dict(model.named_parameters()), direct_bytes=0, codec=codec)
    accidents: dict[str, Callable[[object], None]] = {
        "dies": lambda _: os._exit(5),
        "stops": lambda _: stop(DEADLINE + 5),
        "sleeps": lambda _: time.sleep(DEADLINE + 5) or os._exit(5),
    }
    for step in range(100):
        reducer.begin()
        reducer.arm()
        if world.rank == 1 and step == 3:
            model[1].weight.register_post_accumulate_grad_hook(accidents[fault])
        model(torch.ones(1, 300)).sum().backward()
        reducer.finish()


def stop(seconds: float) -> None:
    """Stop this process as it stands; it is ended later, so that the test need not wait for it."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def others(outcomes: list[Outcome]) -> list[Outcome]:
    """Return how the ranks without the accident ended."""
    return [outcomes[0], *outcomes[2:]]


@pytest.mark.several
@pytest.mark.parametrize("codec", ["fp32", "int8", "powersgd"])
def test_a_rank_that_dies_is_named_at_once(codec: str) -> None:
    outcomes = outcomes_on_ranks(3, trains, codec, "dies", deadline=20.0)
    assert outcomes[1].code == 5
    for outcome in others(outcomes):
        assert isinstance(outcome.error, PeerError), outcome.trace
        assert outcome.error.consequence and "gradients of" in str(outcome.error)
        assert outcome.seconds - outcomes[1].seconds < SOON
    # One that is left may only have seen the other one go, which had named the first cause.
    assert any(outcome.error.peers == (1,) for outcome in others(outcomes)), [str(o.error) for o in others(outcomes)]


@pytest.mark.several
@pytest.mark.parametrize(("codec", "fault"), [("fp32", "stops"), ("int8", "stops"), ("powersgd", "sleeps")])
def test_a_rank_that_stalls_is_named_within_the_deadline(codec: str, fault: str) -> None:
    """Rank 1 is stopped as by a stalled machine, or stays in the user's own code, until the others are gone."""
    outcomes = outcomes_on_ranks(3, trains, codec, fault, deadline=DEADLINE, timeout=30.0)
    for outcome in others(outcomes):
        assert isinstance(outcome.error, PeerError), outcome.trace or outcome.output
        assert "gradients of" in str(outcome.error) and "did not answer" in str(outcome.error)
        assert outcome.seconds < outcomes[1].seconds
    said = [str(outcome.error) for outcome in others(outcomes)]
    assert any(outcome.error.peers == (1,) for outcome in others(outcomes)), said
    what = "rank 1 gives no sign of life" if fault == "stops" else "rank 1 is at test_faults.py"
    assert any(what in text for text in said), said


def shares(world: World, fault: str) -> None:
    """Two groups of two share out; rank 1 dies in a backward, or when it should send new values."""
    among = sharers(world, copies=4, pipeline=1, ranks=2)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    table = dict(model.named_parameters())
    owners = {name: number % 2 for number, name in enumerate(table)}
    reducer = ShardedReducer(world, among.near, table, owners, among=among)
    for step in range(100):
        reducer.begin()
        if world.rank == 1 and step == 3:
            if fault == "before new values":
                os._exit(5)
            model[1].weight.register_post_accumulate_grad_hook(lambda _: os._exit(5))
        reducer.spread(at_once=())
        reducer.arm()
        model(torch.ones(1, 300)).sum().backward()
        reducer.finish()


@pytest.mark.several
@pytest.mark.parametrize("fault", ["before new values", "in backward"])
def test_a_rank_that_dies_while_hosts_share_out_ends_all(fault: str) -> None:
    outcomes = outcomes_on_ranks(4, shares, fault, deadline=20.0)
    assert outcomes[1].code == 5
    for outcome in others(outcomes):
        assert isinstance(outcome.error, PeerError), outcome.trace
        assert outcome.seconds - outcomes[1].seconds < SOON
    # rank 0 shares with it, and rank 3 sums what it owns with it
    near = str(outcomes[0].error)
    assert "rank 1" in near and ("new values of" if fault == "before new values" else "gradients of") in near, near


def hears(world: World) -> None:
    """Rank 0 waits for a collective to which rank 1 never comes; rank 1 says that it has lost somebody."""
    if world.rank:
        assert world.roll_call is not None
        world.roll_call.blame([0], "lost")
        time.sleep(4 * GRACE)
    else:
        world.all_reduce(torch.zeros(3))


@pytest.mark.several
def test_another_ranks_alarm_ends_a_wait_that_gloo_would_let_go_on() -> None:
    """As when one of several collectives failed: gloo then reads nothing more from that connection."""
    outcomes = outcomes_on_ranks(2, hears, deadline=30.0)
    said = str(outcomes[0].error)
    assert "another rank said so" in said and "rank 1 is at test_faults.py" in said
    assert outcomes[0].seconds < 20
