"""New values of parameters that are still on their way: whichever way the program reaches them, it waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import headway
from headway.collective.shard import ShardedReducer
from headway.collective.world import World
from headway.layout.ownership import share_out
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

WIDE = 1200


class Doubled(torch.autograd.Function):
    """A function of its own with a weight as an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * gradients[0] @ weight.T, 2 * x.T @ gradients[0]


class Odd(nn.Module):
    """Parameters that are used in other ways than by the module that has them, the largest registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDE, WIDE)
        self.word = nn.Embedding(11, 8)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.look = nn.MultiheadAttention(8, 2, batch_first=True)
        self.several = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
        self.wide = nn.Linear(8, WIDE)
        self.never = nn.Linear(200, 200)
        self.elsewhere = [nn.Parameter(torch.randn(8)) for _ in range(2)]
        self.bias = self.elsewhere[1]
        self.other = self.elsewhere[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.memory(self.word(tokens))[0]
        x = x + self.look(x, x, x, need_weights=False)[0] + torch.stack(self.elsewhere).sum(0)
        for weight in self.several:
            x = Doubled.apply(x.reshape(-1, weight.shape[0]), weight).view(x.shape)
        x = torch.einsum("btd,vd->btv", x, self.word.weight) @ self.word.weight
        return self.last(self.wide(x)).square().mean()


def values_of(step: int) -> dict[str, torch.Tensor]:
    """What the owners have made of all parameters before a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in Odd().named_parameters()}


def spread(world: World) -> None:
    """Change owned parameters, and compute at once, with all of them."""
    torch.manual_seed(0)
    model, reference = Odd(), Odd()
    table = dict(model.named_parameters())
    sizes = {name: p.numel() for name, p in table.items()}
    owners = share_out(sizes, dict.fromkeys(sizes, (0,)), world.size)
    reducer = ShardedReducer(world, world.group(range(world.size)), table, owners)
    tokens = torch.randint(11, (2, 5))
    used: tuple[str, ...] = ()
    for step in range(4):
        want = values_of(step)
        reference.load_state_dict(want, strict=False)
        with torch.no_grad():
            for name in reducer.owned:
                table[name].copy_(want[name])
        reducer.begin()
        reducer.spread(at_once={"look.in_proj_weight"})
        assert type(table["look.in_proj_weight"]) is nn.Parameter
        coming = type(table["last.weight"])
        assert coming is not nn.Parameter and issubclass(coming, nn.Parameter)
        assert table["last.weight"].shape == (WIDE, WIDE) and table["last.weight"].requires_grad
        assert type(table["last.weight"]) is coming, "looking at its shape does not wait"
        reducer.arm()
        value = model(tokens)
        assert torch.equal(value, reference(tokens)), step
        assert type(table["last.weight"]) is nn.Parameter and type(table["never.weight"]) is coming
        used = reducer.used_first
        value.backward()
        reducer.finish()
        for name, parameter in table.items():
            assert type(parameter) is nn.Parameter and torch.equal(parameter, want[name]), name
    assert used.index("word.weight") < used.index("look.out_proj.weight") < used.index("last.weight")
    reducer.begin()
    reducer.spread(at_once=())
    table["never.weight"].detach().numpy()  # between a step that failed and the next
    reducer.spread()
    assert all(type(parameter) is nn.Parameter for parameter in table.values())
    reducer.close()


def test_values_are_awaited_where_they_are_used() -> None:
    on_ranks(2, spread)


class Renormed(nn.Module):
    """A model that writes its own weight while it runs; the second part is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.quick = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm(dim=1, keepdim=True))
        return self.quick(self.second(torch.tanh(self.first(x))))


def error(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean square against the inputs."""
    return functional.mse_loss(model(batch), batch)


def written(world: World) -> list[float]:
    """Train that model, in plain copies and shared out."""
    found = []
    for shard in ("none", "optimizer"):
        torch.manual_seed(0)
        model = Renormed()
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        fixed = {"data": 2, "pipeline": 1, "shard": shard, "num_micro_batches": 1}
        plan = headway.plan(model, error, batch, cluster="2xcpu:4GiB", fixed=fixed)
        parallel = ParallelModel(model, error, plan, world)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            found.append(float(parallel.forward_backward(batch)))
            optimizer.step()
    return found


def test_a_model_that_writes_its_weights_or_is_compiled_trains_as_plain_copies() -> None:
    for found in on_ranks(2, written, timeout=90):
        plain, shared = found[:4], found[4:]
        torch.testing.assert_close(torch.tensor(shared), torch.tensor(plain), rtol=1e-6, atol=0)
        assert plain[-1] < plain[0]
