"""Sharding in plans: what it saves by hand-made numbers, when it is chosen, which modules are gathered one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.cost.cluster import Cluster, Device, Link
from headway.cost.memory import RUNTIME_BYTES_CPU
from headway.graph.record import record
from headway.planner.plan import Plan
from headway.planner.search import search
from headway.planner.shard import MESSAGE_BYTES, gather_seconds, gathered
from headway.units import format_seconds
from tests.cost.graphs import chain, times
from tests.graph.programs import GPT, next_token, square, tokens

LAYER = 256 * 256 * 4
LAYERS = 8


def plan(size: int = 4, memory: int = 1 << 30, bandwidth: float = 1e9, **fixed: object) -> Plan:
    device = Device("cpu", memory, 1e10, 1e10, 1e9)
    cluster = Cluster(f"{size}xcpu:1GiB", device=device, link_inside=Link(1e-5, bandwidth))
    return search(lambda n: chain(n, (256,) * (LAYERS + 1)), times, cluster, global_batch=8, fixed=fixed)


def test_static_bytes_are_those_of_the_fullest_owner() -> None:
    whole = plan(data=4, pipeline=1)
    states = plan(data=4, pipeline=1, shard="optimizer", num_micro_batches=whole.num_micro_batches)
    # of two states for each of 8 equal layers a copy keeps those of 2; and it keeps messages
    saved = 2 * (LAYERS - 2) * LAYER
    messages = min(MESSAGE_BYTES, LAYERS * LAYER)
    assert whole.stages[0].static_bytes - states.stages[0].static_bytes == saved - messages
    assert states.stages[0].update < whole.stages[0].update / 3
    assert (states.shard, states.neighbours) == ("optimizer", 1) and "share out optimizer states" in str(states)
    slices = plan(data=4, pipeline=1, shard="parameters", num_micro_batches=whole.num_micro_batches)
    # parameters, gradients twice and two states: a quarter of each
    saved = LAYERS * LAYER * (1 + 1 + 2) - LAYERS * LAYER * (1 + 2 + 2) // 4
    assert whole.stages[0].static_bytes - slices.stages[0].static_bytes == saved - messages


def test_what_crosses_takes_as_long_as_it_should() -> None:
    slow = {"bandwidth": 1e7, "data": 4, "pipeline": 1, "num_micro_batches": 2}
    whole, states, gradients, slices = (plan(shard=s, **slow) for s in ("none", "optimizer", "gradients", "parameters"))
    half = gather_seconds(LAYERS * LAYER, 4, Link(1e-5, 1e7))
    assert half == pytest.approx(0.75 * LAYERS * LAYER / 1e7, rel=1e-3)
    # to owners and back is one all-reduce; the way there hides behind the backward, the way back behind the forward
    beside = states.stages[0].forward + states.stages[0].backward
    assert 2 * half - beside <= states.stages[0].reduce <= 2 * half * 1.01
    assert whole.stages[0].reduce - states.stages[0].reduce <= states.stages[0].forward
    assert states.stages[0].reduce < gradients.stages[0].reduce <= 3 * half * 1.01
    assert gradients.stages[0].reduce < slices.stages[0].reduce <= 8 * half * 1.01


FAST, SLOW = Link(1e-6, 1e10), Link(1e-6, 1e7)


def on_hosts(memory: int = 1 << 30, **fixed: object) -> Plan:
    """Plan for two hosts of four, with a slow link between them."""
    device = Device("cpu", memory, 1e10, 1e10, 1e9)
    cluster = Cluster("2x4xcpu:1GiB", device=device, link_inside=FAST, link_between=SLOW)
    wanted = {"data": 8, "pipeline": 1, "num_micro_batches": 1, **fixed}
    return search(lambda n: chain(n, (256,) * (LAYERS + 1)), times, cluster, global_batch=8, fixed=wanted)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_hosts_share_out_by_themselves_where_that_is_faster_and_fits(shard: str) -> None:
    near, every = on_hosts(shard=shard), on_hosts(shard=shard, shard_ranks=8)
    assert (near.shard_ranks, every.shard_ranks) == (4, None)
    # Across, a host sends all sums once and gets as much: an all-reduce of two. With eight owners each of a host's four
    # ranks sends 4/8 of its gradients there, and four owners send their eighth to four ranks; slices cross three times,
    # and before anything runs what is in no block, here all, once more.
    size = LAYERS * LAYER / 1e7
    ways = 3 if shard == "parameters" else 2
    beside = near.stages[0].forward + near.stages[0].backward
    assert size - beside <= near.stages[0].reduce <= 1.02 * size
    most = 4 if shard == "parameters" else 2
    assert 2 * ways * size - ways * beside <= every.stages[0].reduce <= 1.02 * 2 * most * size
    assert near.seconds is not None and every.seconds is not None and near.seconds < 0.6 * every.seconds
    assert near.reasons[1].startswith("shared out among the 4 copies of each host; hosts hold the same: among all 8")
    assert "shared out in groups of 4" in str(near) and "shard_ranks=4" in near.explain()
    # Eight owners hold less. Where a host's four are too few, all share, and the reason is what the others would need.
    assert max(every.memory) < max(near.memory)
    tight = on_hosts(shard=shard, memory=max(every.memory))
    assert tight.shard_ranks is None and max(tight.memory) <= max(every.memory)
    assert tight.reasons[1].startswith("shared out among all 8 copies: among the 4 of each host would take ")


def test_plain_copies_on_hosts_say_when_sharing_out_would_be_faster() -> None:
    plain, shared = on_hosts(codec="fp32"), on_hosts(codec="fp32", shard="optimizer")
    assert plain.shard == "none" and plain.seconds is not None and shared.seconds is not None
    assert shared.seconds < 0.95 * plain.seconds
    said = f"a step would take {format_seconds(shared.seconds)}, this {format_seconds(plain.seconds)}, with fixed="
    assert [reason for reason in plain.reasons if "cross beside the next forward" in reason][0].startswith(said)
    for other in (shared, plan(data=4, pipeline=1)):
        assert not [reason for reason in other.reasons if "cross beside the next forward" in reason]


def test_each_way_of_sharing_out_has_its_own_codec() -> None:
    """Where hosts sum before anything crosses, an exact sum may do; with eight owners the link asks for 16 bits."""
    device = Device("cpu", 1 << 30, 1e10, 1e10, 1e9)
    found = {}
    for ranks in (4, 8):
        cluster = Cluster("2x4xcpu:1GiB", device=device, link_inside=FAST, link_between=Link(1e-6, 3e8))
        wanted = {"data": 8, "pipeline": 1, "num_micro_batches": 1, "shard": "optimizer", "shard_ranks": ranks}
        found[ranks] = search(
            lambda n: chain(n, (256,) * (LAYERS + 1)), times, cluster, global_batch=8, fixed=wanted,
            codec_work={"fp16": 1e-10, "bf16": 1e-10},
        )  # fmt: skip
    assert (found[4].codec, found[8].codec) == ("fp32", "fp16")
    assert any(reason.startswith("gradients cross as fp16") for reason in found[8].reasons)


def test_groups_that_are_asked_for(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = plan(shard="optimizer", data=4, pipeline=1, shard_ranks=2)
    assert made.shard_ranks == 2 and "shared out among 2 copies at a time, as asked" in made.explain()
    made.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == made
    whole = plan(shard="optimizer", data=4, pipeline=1, num_micro_batches=made.num_micro_batches)
    assert made.stages[0].static_bytes - whole.stages[0].static_bytes == 2 * 2 * LAYER  # four layers' states, not two's


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_a_fixed_shard_is_used(shard: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = plan(shard=shard)
    assert made.shard == shard
    made.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == made
    assert made.pipeline == 1 or shard != "parameters"


def test_states_are_shared_out_when_copies_do_not_fit_and_stages_are_slower() -> None:
    # 2 MiB of parameters and of gradients, 4 MiB of states: 8 MiB; a quarter of the states is 1 MiB, messages take 2
    tight = RUNTIME_BYTES_CPU + (9 << 20)
    assert plan(memory=tight).shard == "none"
    less = RUNTIME_BYTES_CPU + 31 * LAYER
    found = plan(memory=less, pipeline=1)
    assert found.shard != "none" and max(found.memory) <= less
    assert found.reasons[0].startswith("a whole model with gradients and AdamW's states needs 40")
    assert "a rank has 39.8 MiB; when copies share out" in found.reasons[0]
    assert not next(other for other in found.runners_up if other.shard == "none").fits
    assert plan(memory=less, pipeline=1, data=4, shard="optimizer").reasons[0].startswith("when copies share out the")


class Tied(nn.Module):
    """Blocks of which one has a weight that the last layer uses too, and one whose weight is used outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.blocks[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x) @ self.blocks[3].weight


class Again(nn.Module):
    """One layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


def test_repeated_blocks_are_gathered_one_at_a_time() -> None:
    model = GPT()
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Block"]
    assert len(names) > 1
    assert list(gathered(record(model, next_token, tokens()))) == names
    assert gathered(record(Tied(), square, torch.randn(2, 4))) == ("blocks.0", "blocks.2", "blocks.4")
    assert gathered(record(Again(), square, torch.randn(2, 4))) == ()
