"""A small model with all that a checkpoint must keep, trained from a checkpoint to a checkpoint under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import headway
from headway.collective.slices import whole
from headway.collective.world import World
from headway.run.parallel import ParallelModel

SAMPLES = 12


class Net(nn.Module):
    """Dropout, batch norm early and late, a tied pair of embeddings, a frozen layer and an unused one, a constant."""

    def __init__(self, hidden: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, hidden)
        self.frozen = nn.Linear(hidden, hidden).requires_grad_(False)
        self.norm = nn.BatchNorm1d(hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.norm_out = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch] to logits [batch, 11]."""
        x = self.norm(self.frozen(self.embed(tokens)))
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.head(self.norm_out(x)) * self.scale


class Bare(nn.Module):
    """One layer, then steps without parameters: the second of two stages has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch] to logits [batch, 11]."""
        x = self.layer(tokens[:, None].to(self.layer.weight.dtype).expand(-1, 4))
        for _ in range(6):
            x = torch.tanh(x) * 1.1
        return x


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens), targets)


def batches(first: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the global batches of steps first, first + 1, ...; the global generator is left alone."""
    made = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        made.append(tuple(torch.randint(11, (2, SAMPLES), generator=generator)))
    return made


def build(seed: int = 0, **options: Any) -> Net:
    """Make the model in float64."""
    torch.manual_seed(seed)
    return Net(**options).double()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with two groups: weights decay, biases and norms do not."""
    named = list(model.named_parameters())
    if not named:
        return torch.optim.AdamW(model.parameters(), lr=0.02)
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def plan_of(data: int, stages: int, model: nn.Module, shard: str = "none") -> headway.Plan:
    """Plan with micro-batches of two samples each, so that batch norm sees the same under every plan."""
    fixed = {"data": data, "pipeline": stages, "num_micro_batches": SAMPLES // 2 // data, "shard": shard}
    cluster = f"{data * stages}xcpu:4GiB"
    return headway.plan(model, loss, batches(0, 1)[0], cluster=cluster, fixed=fixed, verify=False)


def put(world: World, plan: headway.Plan, model: nn.Module) -> ParallelModel:
    """Put a model under a plan; under one for one process, each rank of the world is a job by itself."""
    return ParallelModel(model, loss, plan, world if plan.size > 1 else World())


def train(model: ParallelModel, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    """Train some steps, lowering the learning rate of all groups a little each; return the losses."""
    values = []
    for batch in batches(first, count):
        optimizer.zero_grad()
        values.append(float(model.forward_backward(model.share(batch))))
        model.clip_grad_norm(1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return values


def whole_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Collect the full state of the model and this rank's of the optimizer."""
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {
            f"{name} {k}": whole(v).clone() for k, v in optimizer.state.get(parameter, {}).items() if v is not None
        }
    return state


def files_of(directory: Path) -> list[str]:
    """List the files of a checkpoint."""
    return sorted(path.name for path in directory.iterdir())
