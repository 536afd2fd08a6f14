"""Programs: random models with losses and batches, each from one integer: what is hard to divide, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway.run.microbatch import Mean, Shared

CLASSES = 5


class Halved(torch.autograd.Function):
    """A function with a backward of its own, which is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Give half of the values."""
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Give three quarters of the gradient."""
        return gradients[0] * 0.75


@dataclass
class Values:
    """What a program has made so far, by kind; all floats end in the model's width."""

    floats: list[torch.Tensor]
    ints: list[torch.Tensor]
    bools: list[torch.Tensor]
    scalars: list[torch.Tensor]
    turned: list[torch.Tensor]  # first and last dim exchanged
    halves: list[torch.Tensor]  # half the width
    other: list[Any]  # (how to read it, value)


@dataclass(frozen=True)
class Order:
    """One thing to do: its name, which earlier values to take, and what a module or a region has inside."""

    name: str
    a: int
    b: int
    inner: tuple[Order, ...] = ()


# Orders that see more than one sample at a time, or read values: one process must see the same micro-batches.
MIXING = frozenset({"batchnorm", "branch", "loop", "meaned", "item", "moving", "single", "counter", "reentrant"})
RANDOM = frozenset({"dropout", "noise", "attend_dropped"})
PLAIN = (
    "linear", "linear", "linear", "linear", "shared", "shared", "tied", "turned_weight", "mlp", "inplace_first",
    "layernorm", "batchnorm", "embed", "attention", "gru", "conv", "add", "add", "add_inplace", "write",
    "view_write", "view_of_view", "chunk", "strided", "join_halves", "turn", "turn_back", "argmax", "count_up",
    "one_hot", "compare", "mask", "where", "and", "scale", "scaled", "meaned", "item", "branch", "branch_parameter",
    "loop", "experts", "select", "detach", "no_grad", "custom", "hook", "single", "clone", "vector", "product",
    "frozen", "constant", "counter", "moving", "bare", "keep", "kept", "sort", "topk", "unbind", "lstm", "complex",
    "real", "empty", "whole_empty", "expand", "dropout", "noise", "attend_dropped", "parametrized", "stack",
    "mutate", "inplace_param", "cummax", "split_sizes", "bilinear", "square_loss", "groupnorm", "index_put",
    "residual_inplace",
)  # fmt: skip


class Program(nn.Module):
    """Carries out orders on values of [samples, (time,) width]."""

    def __init__(self, orders: tuple[Order, ...], shared: Shelf, width: int) -> None:
        super().__init__()
        self.orders, self.width = orders, width
        self.layers, self.words = shared.layers, shared.words  # used by all programs of a model: tied
        self.scale = nn.Parameter(torch.full((1,) * shared.dims, 0.1))
        self.vector = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.classes = nn.Parameter(torch.randn(CLASSES, width) * 0.3)
        self.register_buffer("constant", torch.linspace(-1, 1, width))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("moving", torch.zeros(width))
        self.own = nn.ModuleDict()
        self.unused = nn.Linear(2, 2)
        self.kept: torch.Tensor | None = None
        for number, order in enumerate(orders):
            made = make(order, shared, width)
            if made is not None:
                self.own[str(number)] = made

    def forward(self, values: Values) -> Values:
        """Do all orders; returns the values, in new lists."""
        v = Values(*(list(getattr(values, name)) for name in Values.__dataclass_fields__))
        self.kept = None
        for number, order in enumerate(self.orders):
            own = self.own[str(number)] if str(number) in self.own else None
            getattr(self, f"do_{order.name}")(v, order, own)
        return v

    # layers

    def do_linear(self, v: Values, order: Order, own: Any) -> None:
        push(v, own(pick(v.floats, order.a)))

    do_parametrized = do_layernorm = do_mlp = do_frozen = do_bare = do_dropout = do_linear

    def do_shared(self, v: Values, order: Order, own: Any) -> None:
        push(v, self.layers[order.b % len(self.layers)](pick(v.floats, order.a)))

    def do_tied(self, v: Values, order: Order, own: Any) -> None:
        push(v, functional.linear(pick(v.floats, order.a), self.layers[order.b % len(self.layers)].weight))

    def do_turned_weight(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a) @ self.layers[order.b % len(self.layers)].weight.T)

    def do_inplace_first(self, v: Values, order: Order, own: Any) -> None:
        push(v, own(pick(v.floats, order.a) * 1 + 0.1))

    def do_batchnorm(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, own(x.reshape(-1, self.width)).view(x.shape))

    def do_groupnorm(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, own(x.reshape(-1, self.width)).view(x.shape))

    def do_embed(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a) + (self.words if order.b % 2 else own)(pick(v.ints, order.b)))

    def do_attention(self, v: Values, order: Order, own: Any) -> None:
        x = in_time(pick(v.floats, order.a))
        value, causal = in_time(pick(v.floats, order.b)), order.b % 2 == 0
        out = functional.scaled_dot_product_attention(own(x), x, value, is_causal=causal)
        push(v, out.reshape(pick(v.floats, order.a).shape))

    def do_attend_dropped(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, own(in_time(x)).reshape(x.shape))

    def do_gru(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, own(in_time(x))[0].reshape(x.shape))

    do_lstm = do_gru

    def do_conv(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, own(x.reshape(-1, 1, self.width)).reshape(x.shape))

    def do_bilinear(self, v: Values, order: Order, own: Any) -> None:
        push(v, own(pick(v.floats, order.a), pick(v.floats, order.b)).tanh())

    # arithmetic, views and writes

    def do_add(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a) * 0.5 + pick(v.floats, order.b))

    def do_add_inplace(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a).tanh() * 1.5
        x += pick(v.floats, order.b) / 4
        push(v, x)

    def do_residual_inplace(self, v: Values, order: Order, own: Any) -> None:
        v.floats[order.a % len(v.floats)].add_(own(pick(v.floats, order.b)))

    def do_write(self, v: Values, order: Order, own: Any) -> None:
        x, y = pick(v.floats, order.a), pick(v.floats, order.b)
        out = torch.zeros_like(x) if order.a % 2 else x * 1
        out[..., order.a % self.width] = y[..., order.b % self.width]
        push(v, out.add_(y))

    def do_view_write(self, v: Values, order: Order, own: Any) -> None:
        out = pick(v.floats, order.a) * 1
        part = out[..., : 1 + order.b % self.width]
        part.mul_(2)
        push(v, out.add_(0.1))

    def do_view_of_view(self, v: Values, order: Order, own: Any) -> None:
        out = pick(v.floats, order.a) * 1
        half = out.unflatten(-1, (2, -1))[..., order.b % 2, :]
        push(v, out)
        v.halves.append(half)
        half.detach().add_(0.25)

    def do_index_put(self, v: Values, order: Order, own: Any) -> None:
        out = pick(v.floats, order.a).clone()
        out[pick(v.floats, order.b) > 0.3] = 0.3
        push(v, out)

    def do_chunk(self, v: Values, order: Order, own: Any) -> None:
        v.halves.extend(pick(v.floats, order.a).chunk(2, -1))

    def do_split_sizes(self, v: Values, order: Order, own: Any) -> None:
        one, rest = pick(v.floats, order.a).split([1, self.width - 1], -1)
        push(v, torch.cat([rest, one.sigmoid()], -1))

    def do_strided(self, v: Values, order: Order, own: Any) -> None:
        v.halves.append(pick(v.floats, order.a)[..., order.b % 2 :: 2])

    def do_join_halves(self, v: Values, order: Order, own: Any) -> None:
        if v.halves:
            push(v, torch.cat([pick(v.halves, order.a), pick(v.halves, order.b)], -1))

    def do_turn(self, v: Values, order: Order, own: Any) -> None:
        v.turned.append(pick(v.floats, order.a).transpose(0, -1))

    def do_turn_back(self, v: Values, order: Order, own: Any) -> None:
        if v.turned:
            push(v, pick(v.turned, order.a).transpose(0, -1) * 0.9)

    def do_expand(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, x[..., :1].expand_as(x))

    def do_clone(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a).clone())

    def do_unbind(self, v: Values, order: Order, own: Any) -> None:
        columns = pick(v.floats, order.a).unbind(-1)
        push(v, torch.stack([columns[-1], *columns[:-1]], -1))

    def do_stack(self, v: Values, order: Order, own: Any) -> None:
        push(v, torch.stack([pick(v.floats, order.a), pick(v.floats, order.b)]).mean(0))

    def do_empty(self, v: Values, order: Order, own: Any) -> None:
        v.other.append(("empty", pick(v.floats, order.a)[..., :0]))

    def do_whole_empty(self, v: Values, order: Order, own: Any) -> None:
        for kind, value in v.other:
            if kind == "empty":
                push(v, torch.cat([value, pick(v.floats, order.a)], -1))

    def do_complex(self, v: Values, order: Order, own: Any) -> None:
        v.other.append(("complex", torch.fft.rfft(pick(v.floats, order.a))))

    def do_real(self, v: Values, order: Order, own: Any) -> None:
        for kind, value in v.other:
            if kind == "complex":
                push(v, torch.fft.irfft(value, n=self.width) * 0.7)

    def do_single(self, v: Values, order: Order, own: Any) -> None:
        v.other.append(("single", pick(v.floats, order.a).float()))
        push(v, v.other[-1][1].double() * 0.5)

    # integers and masks

    def do_argmax(self, v: Values, order: Order, own: Any) -> None:
        v.ints.append(pick(v.floats, order.a).argmax(-1) % CLASSES)

    def do_count_up(self, v: Values, order: Order, own: Any) -> None:
        v.ints.append((pick(v.ints, order.a) + 1 + order.b) % CLASSES)

    def do_one_hot(self, v: Values, order: Order, own: Any) -> None:
        hot = functional.one_hot(pick(v.ints, order.a), CLASSES)
        push(v, hot.to(self.classes) @ self.classes)

    def do_compare(self, v: Values, order: Order, own: Any) -> None:
        v.bools.append(pick(v.floats, order.a) > pick(v.floats, order.b) + 0.01)

    def do_mask(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a).masked_fill(pick(v.bools, order.b), 0.2))

    def do_where(self, v: Values, order: Order, own: Any) -> None:
        push(v, torch.where(pick(v.bools, order.a + order.b), pick(v.floats, order.a), pick(v.floats, order.b)))

    def do_and(self, v: Values, order: Order, own: Any) -> None:
        v.bools.append(pick(v.bools, order.a) & ~pick(v.bools, order.b))

    def do_sort(self, v: Values, order: Order, own: Any) -> None:
        values, places = pick(v.floats, order.a).sort(-1)
        push(v, values + pick(v.floats, order.b).gather(-1, places))

    def do_topk(self, v: Values, order: Order, own: Any) -> None:
        found = pick(v.floats, order.a).topk(self.width // 2, -1)
        v.halves.append(found.values)
        v.ints.append(found.indices[..., 0] % CLASSES)

    def do_cummax(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a).cummax(-1).values)

    def do_experts(self, v: Values, order: Order, own: Any) -> None:
        x, chosen = pick(v.floats, order.a), pick(v.ints, order.b)
        out = torch.zeros_like(x)
        for number, expert in enumerate(own):
            rows = chosen == number
            if rows.any():
                out[rows] = expert(x[rows])
        push(v, out + x)

    def do_select(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        flat = x.reshape(-1, self.width)
        rows = (pick(v.ints, order.b).reshape(-1) > 1).nonzero()[:, 0]
        push(v, flat.index_add(0, rows, own(flat[rows])).view(x.shape))

    # scalars, and values that are read

    def do_scale(self, v: Values, order: Order, own: Any) -> None:
        v.scalars.append((self.scale * (1 + order.a)).exp().sum())

    def do_scaled(self, v: Values, order: Order, own: Any) -> None:
        if v.scalars:
            push(v, pick(v.floats, order.a) * pick(v.scalars, order.b).tanh())

    def do_meaned(self, v: Values, order: Order, own: Any) -> None:
        v.scalars.append(pick(v.floats, order.a).mean())

    def do_item(self, v: Values, order: Order, own: Any) -> None:
        most = pick(v.floats, order.a).detach().abs().max().item()
        push(v, pick(v.floats, order.b) / (1 + most))

    def do_branch(self, v: Values, order: Order, own: Any) -> None:
        x, y = pick(v.floats, order.a), pick(v.floats, order.b)
        push(v, own(x) if y.sum() > 0 else x - y * 0.5)

    def do_branch_parameter(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, own(x) if self.scale > 0 else x)

    def do_loop(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        for _ in range(int(pick(v.floats, order.b).detach().abs().sum().item() * 10) % 3):
            x = (own(x) * 0.7).sin() + 0.1
        push(v, x)

    # gradients

    def do_detach(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a) + pick(v.floats, order.b).detach())

    def do_no_grad(self, v: Values, order: Order, own: Any) -> None:
        with torch.no_grad():
            fixed = own(pick(v.floats, order.a)).tanh()
        push(v, pick(v.floats, order.b) * fixed)

    def do_custom(self, v: Values, order: Order, own: Any) -> None:
        push(v, Halved.apply(pick(v.floats, order.a)))

    def do_hook(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a) * 1.1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        push(v, x)

    def do_square_loss(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, x * x.square().mean(-1, keepdim=True).add(1).rsqrt())

    # parameters and buffers that the program takes itself

    def do_vector(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a) * self.vector + self.constant)

    def do_product(self, v: Values, order: Order, own: Any) -> None:
        v.other.append(("weight", self.layers[0].weight @ self.layers[order.b % len(self.layers)].weight))
        kind, weight = pick([o for o in v.other if o[0] == "weight"], order.a)
        push(v, pick(v.floats, order.a) @ weight * 0.5)

    def do_inplace_param(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a).mul(self.vector).sub_(self.vector.sum() * 0.1))

    def do_constant(self, v: Values, order: Order, own: Any) -> None:
        push(v, pick(v.floats, order.a) + self.constant)

    def do_counter(self, v: Values, order: Order, own: Any) -> None:
        if self.training:
            self.counter += 1

    def do_moving(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        if self.training:
            self.moving.lerp_(x.detach().reshape(-1, self.width).mean(0), 0.1)
        push(v, x - self.moving)

    # state beside what is passed

    def do_keep(self, v: Values, order: Order, own: Any) -> None:
        self.kept = pick(v.floats, order.a)

    def do_kept(self, v: Values, order: Order, own: Any) -> None:
        if self.kept is not None:
            push(v, self.kept * 0.8 + pick(v.floats, order.a))

    def do_mutate(self, v: Values, order: Order, own: Any) -> None:
        own(v.floats, order.a)

    # random numbers

    def do_noise(self, v: Values, order: Order, own: Any) -> None:
        x = pick(v.floats, order.a)
        push(v, x + torch.randn_like(x) * 0.1 if self.training else x)

    # what is inside something

    def do_module(self, v: Values, order: Order, own: Any) -> None:
        push(v, *own(Values(v.floats[-3:], v.ints[-2:], v.bools[-2:], [], [], [], [])).floats[-2:])

    def do_twice(self, v: Values, order: Order, own: Any) -> None:
        for _ in range(2):
            self.do_module(v, order, own)

    def do_region(self, v: Values, order: Order, own: Any) -> None:
        ints, bools = v.ints[-2:], v.bools[-2:]

        def inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return own(Values([x, y], ints, bools, [], [], [], [])).floats[-1]

        x, y = pick(v.floats, order.a), pick(v.floats, order.b)
        push(v, checkpoint(inside, x, y, use_reentrant=order.name == "reentrant"))

    do_reentrant = do_region


class Shelf(nn.Module):
    """Layers that several places of a model use."""

    def __init__(self, width: int, dims: int) -> None:
        super().__init__()
        self.dims = dims  # of what is one number
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.words = nn.Embedding(CLASSES, width)


class Adder(nn.Module):
    """Returns nothing: appends to the list that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, values: list[torch.Tensor], number: int) -> None:
        """Append one value."""
        values.append(self.layer(pick(values, number)).tanh())


def make(order: Order, shared: Shelf, width: int) -> nn.Module | None:
    """Make the module that an order has of its own."""
    name, linear = order.name, lambda: nn.Linear(width, width)
    if order.inner:
        return Program(order.inner, shared, width)
    table: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(linear(), nn.GELU(), linear(), nn.Dropout(0.0)),
        "inplace_first": lambda: nn.Sequential(nn.LeakyReLU(0.3, inplace=True), linear()),
        "layernorm": lambda: nn.LayerNorm(width),
        "batchnorm": lambda: nn.BatchNorm1d(width, momentum=(0.1, 0.3, None)[order.a % 3]),
        "groupnorm": lambda: nn.GroupNorm(2, width),
        "embed": lambda: nn.Embedding(CLASSES, width),
        "attention": linear,
        "attend_dropped": lambda: nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.3, batch_first=True),
        "gru": lambda: nn.GRU(width, width, batch_first=True),
        "lstm": lambda: nn.LSTM(width, width, batch_first=True),
        "conv": lambda: nn.Conv1d(1, 1, 3, padding=1),
        "bilinear": lambda: nn.Bilinear(width, width, width),
        "frozen": lambda: linear().requires_grad_(False),
        "bare": lambda: nn.Sequential(nn.Tanh(), nn.Softplus(), nn.Identity()),
        "dropout": lambda: nn.Dropout(0.4),
        "parametrized": lambda: nn.utils.parametrizations.weight_norm(linear()),
        "experts": lambda: nn.ModuleList(linear() for _ in range(3)),
        "mutate": lambda: Adder(width),
    }
    if name in ("linear", "select", "branch", "branch_parameter", "loop", "no_grad", "residual_inplace"):
        return linear()
    return table[name]() if name in table else None


def pick(values: list[Any], number: int) -> Any:
    """Take one of the last six."""
    some = values[-6:]
    return some[number % len(some)]


def push(v: Values, *made: torch.Tensor) -> None:
    """Keep what was made."""
    v.floats.extend(made)


def in_time(x: torch.Tensor) -> torch.Tensor:
    """Give [samples, time, width]."""
    return x if x.dim() == 3 else x.unsqueeze(1)


@dataclass
class Made:
    """What a model returns, in a class of its own."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class Recipe:
    """All that a model, its loss and its batches follow from."""

    seed: int
    orders: tuple[Order, ...]
    width: int
    time: int | None
    loss: str
    batch: str
    output: str
    decay: bool

    @property
    def names(self) -> frozenset[str]:
        """Names of all orders, those inside others too."""
        found: set[str] = set()

        def visit(orders: tuple[Order, ...]) -> None:
            for order in orders:
                found.add(order.name)
                visit(order.inner)

        visit(self.orders)
        return frozenset(found)

    @property
    def mixing(self) -> bool:
        """Whether one process must see the same micro-batches."""
        return bool(self.names & MIXING)

    @property
    def random(self) -> bool:
        """Whether random numbers are drawn."""
        return bool(self.names & RANDOM)


def recipe(seed: int, *, without: frozenset[str] = frozenset()) -> Recipe:
    """Draw a recipe."""
    rng = random.Random(seed)
    allowed = [name for name in PLAIN if name not in without]
    if rng.random() < 0.5:  # half of the models see no values of other samples: the whole batch is their oracle too
        allowed = [name for name in allowed if name not in MIXING]
    if rng.random() < 0.6:
        allowed = [name for name in allowed if name not in RANDOM]

    kind = "region" if allowed.count("branch") == 0 else "reentrant"  # torch skips one whose input needs no gradient

    def order(depth: int) -> Order:
        a, b = rng.randrange(12), rng.randrange(12)
        if depth < 2 and rng.random() < 0.18:
            inner = tuple(order(depth + 1) for _ in range(rng.randint(1, 4)))
            return Order(rng.choice(("module", "module", "twice", "region", kind)), a, b, inner)
        return Order(rng.choice(allowed), a, b)

    orders = [order(0) for _ in range(rng.randint(6, 14))]
    orders += [Order("linear", 5, 0), Order("bare", 5, 0)]
    loss = rng.choice(("mean", "mean", "sum", "ignored", "ignored", "constant"))
    return Recipe(
        seed, tuple(orders), rng.choice((4, 6)), rng.choice((None, None, 2, 3)), loss,
        rng.choice(("dict", "tuple", "nested")), rng.choice(("tensor", "dict", "tuple", "made")),
        rng.random() < 0.3 and loss in ("mean",),
    )  # fmt: skip


class Net(nn.Module):
    """A random program between an input and a head; a frozen first layer at times."""

    def __init__(self, made: Recipe) -> None:
        super().__init__()
        self.output = made.output
        self.shelf = Shelf(made.width, made.seed % 4 > 0)
        self.first = nn.Linear(made.width, made.width)
        if made.seed % 3 == 0:
            self.first.requires_grad_(False)
        self.body = Program(made.orders, self.shelf, made.width)
        self.head = nn.Linear(made.width, CLASSES)
        if made.seed % 5 == 0:
            self.head.weight = self.shelf.words.weight
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, *, offset: torch.Tensor | None = None) -> Any:
        """Map [samples, (time,) width] and integers [samples, (time)] to logits."""
        if offset is not None:
            x = x + offset
        start = Values([x, self.first(x)], [tokens], [x > 0], [], [], [], [])
        end = self.body(start)
        hidden = end.floats[-1] + end.floats[-2] * 0.1
        logits = self.head(hidden)
        if self.output == "dict":
            return {"logits": logits, "hidden": hidden, "best": logits.argmax(-1)}
        if self.output == "made":
            return Made(logits, hidden)
        return (logits, [hidden, tokens]) if self.output == "tuple" else logits


def build(made: Recipe, seed: int | None = None) -> Net:
    """Make the model, in float64."""
    torch.manual_seed(made.seed if seed is None else seed)
    return Net(made).double()


def batch_of(made: Recipe, samples: int, number: int, time: int | None = None) -> Any:
    """Make a global batch; `time` in place of the recipe's."""
    generator = torch.Generator().manual_seed(made.seed * 1000 + number)
    dims = () if made.time is None else (time or made.time,)
    x = torch.randn(samples, *dims, made.width, generator=generator, dtype=torch.float64)
    if number % 2:
        x = torch.randn(*dims, made.width, samples, generator=generator, dtype=torch.float64).movedim(-1, 0)
    tokens = torch.randint(CLASSES, (samples, *dims), generator=generator)
    y = torch.randn(samples, *dims, CLASSES, generator=generator, dtype=torch.float64)
    t = torch.randint(-2, CLASSES, (samples, *dims), generator=generator)
    if made.batch == "dict":
        offset = torch.randn(made.width, generator=generator, dtype=torch.float64)
        return {"x": x, "tokens": tokens, "y": y, "t": t.clamp(min=-1), "offset": Shared(offset)}
    if made.batch == "tuple":
        return x, tokens, y, t.clamp(min=-1)
    return {"in": [x, tokens], "out": (y, t.clamp(min=-1)), "names": "text"}


def loss_of(made: Recipe) -> Callable[[nn.Module, Any], Any]:
    """Give the loss function of a recipe."""

    def loss(model: nn.Module, batch: Any) -> Any:
        if made.batch == "dict":
            out = model(batch["x"], tokens=batch["tokens"], offset=batch["offset"])
            y, t = batch["y"], batch["t"]
        elif made.batch == "tuple":
            x, tokens, y, t = batch
            out = model(x, tokens)
        else:
            out, (y, t) = model(*batch["in"]), batch["out"]
        logits = out["logits"] if made.output == "dict" else out[0] if made.output == "tuple" else out
        logits = logits.logits if isinstance(logits, Made) else logits
        wrong = (logits.argmax(-1) != y.argmax(-1)).double()
        metrics = {"wrong": wrong.mean(), "large": Mean(logits.detach().abs().sum(), float(logits.numel()))}
        if made.loss == "sum":
            return (logits - y).square().sum()
        if made.loss == "constant":
            return Mean((logits - y).square().sum(), 1.0), metrics
        if made.loss == "ignored":
            total = functional.cross_entropy(logits.flatten(0, -2), t.flatten(), ignore_index=-1, reduction="sum")
            return Mean(total, (t >= 0).sum()), metrics
        value = (logits - y).square().mean()
        if made.decay:
            value = value + 0.01 * model.shelf.layers[0].weight.square().mean()
        return value, metrics

    return loss
