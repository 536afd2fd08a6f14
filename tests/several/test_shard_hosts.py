"""Two hosts of two ranks, a slow link between them: each host shares out by itself, and sends half of the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.several.hosts import answer_of, tell

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
WIDTH, LAYERS, STEPS = 256, 4, 3
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


class Net(nn.Module):
    """Equal blocks, 1 MiB in all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch), batch.flip(1))


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def plainly(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train as one process."""
    model = build()
    optimizer, values = KINDS[kind](model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch_of(step))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        values.append(float(value.detach()))
    return values, dict(model.state_dict())


def main() -> None:
    """Be one rank: train in each way, count what this host sends in a step; rank 0 prints what it found as JSON."""
    import headway
    from headway.collective.world import World
    from headway.cost.cluster import Cluster, Link
    from headway.launch.identity import identify
    from headway.run.parallel import ParallelModel

    torch.set_num_threads(1)
    world = World.start(identify(), deadline=30.0)
    found: dict[str, Any] = {}
    machine = Cluster("2x2xcpu:4GiB", link_between=Link(2e-4, 25e6))
    for shard, ranks, codec, kind in (
        ("optimizer", None, "fp32", "adamw"), ("optimizer", 4, "fp32", "adamw"), ("optimizer", None, "int8", "adamw"),
        ("gradients", None, "fp32", "sgd"), ("parameters", None, "fp32", "adamw"), ("parameters", 4, "fp32", "adamw"),
        ("parameters", None, "int8", "adamw"),
    ):  # fmt: skip
        asked = {"data": 4, "shard": shard, "codec": codec, "num_micro_batches": 2 if shard == "gradients" else 1}
        asked |= {} if ranks is None else {"shard_ranks": ranks}
        plan = headway.plan(build(), loss, batch_of(0), cluster=machine, fixed=asked)
        parallel = ParallelModel(build(), loss, plan, world)
        optimizer, values, sent = KINDS[kind](parallel.parameters()), [], 0
        for step in range(STEPS):
            optimizer.zero_grad()
            world.barrier()
            before = int(SENT.read_text())
            values.append(float(parallel.forward_backward(parallel.share(batch_of(step)))))
            parallel.clip_grad_norm(0.1)
            optimizer.step()
            world.barrier()
            sent = int(SENT.read_text()) - before
        state = parallel.state_dict()
        want_values, want = plainly(kind)
        error = max(float((state[name] - want[name]).abs().max()) for name in want)
        alike = world.gather_objects([float(value.double().sum()) for value in state.values()])
        found[f"{shard} {ranks or ''} {codec}"] = {
            "ranks": plan.shard_ranks, "sent": sent, "error": error, "same": all(one == alike[0] for one in alike),
            "values": max(abs(a - b) / b for a, b in zip(values, want_values, strict=True)),
        }  # fmt: skip
    tell(world, found)


@pytest.mark.several
def test_hosts_share_out_by_themselves() -> None:
    found = answer_of(__file__, "200mbit", timeout=90, per_host=2)
    size = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    # Sums of each host's owners cross in an all-reduce of two; among all four, each rank sends half of its gradients
    # across, and each owner its quarter twice. Slices are gathered for the forward and for the backward.
    expected = {
        "optimizer  fp32": size, "optimizer 4 fp32": 2 * size, "optimizer  int8": size / 4, "gradients  fp32": size,
        "parameters  fp32": size, "parameters 4 fp32": 3 * size, "parameters  int8": size / 4,
    }  # fmt: skip
    for name, told in found.items():
        assert told["ranks"] == (None if " 4 " in name else 2), name
        assert told["sent"] == pytest.approx(expected[name], rel=0.15, abs=30_000), (name, told)
        assert told["same"] and told["error"] < (4e-3 if "int8" in name else 1e-4), (name, told)
        assert told["values"] < (1e-2 if "int8" in name else 1e-5), (name, told)


if __name__ == "__main__":
    main()
