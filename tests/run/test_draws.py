"""Random numbers of a sample do not depend on which samples are drawn for together with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import headway
from headway.collective.world import World
from headway.graph.chance import is_random
from headway.graph.rows import Rows
from headway.run.parallel import ParallelModel
from headway.run.randomness import Chance

SAMPLES = 6
Draw = Callable[[torch.Tensor], Any]

DRAWS: dict[str, tuple[Any, Callable[[torch.Tensor], tuple[Any, ...]], dict[str, Any]]] = {
    "rand": (torch.rand, lambda x: (len(x), 5), {}),
    "rand of a tuple": (torch.rand, lambda x: ((len(x), 5),), {"dtype": torch.float64}),
    "randn": (torch.randn, lambda x: (len(x),), {}),
    "two rows a sample": (torch.randn, lambda x: (2 * len(x), 3), {}),
    "randint": (torch.randint, lambda x: (3, 9, (len(x), 4)), {}),
    "randint below": (torch.randint, lambda x: (9, (len(x), 4)), {"dtype": torch.float32}),
    "rand_like": (torch.rand_like, lambda x: (x,), {}),
    "randn_like": (torch.randn_like, lambda x: (x,), {}),
    "bernoulli": (torch.bernoulli, lambda x: (x.sigmoid(),), {}),
    "normal": (torch.normal, lambda x: (x, x.abs()), {}),
    "normal around": (torch.normal, lambda x: (x, 2.0), {}),
    "poisson": (torch.poisson, lambda x: (x.abs(),), {}),
    "multinomial": (torch.multinomial, lambda x: (x.abs(), 3), {"replacement": True}),
    "gumbel": (F.gumbel_softmax, lambda x: (x,), {"hard": True}),
    "rrelu": (F.rrelu, lambda x: (x,), {"training": True}),
    "alpha": (F.alpha_dropout, lambda x: (x, 0.3, True), {}),
    "normal_": (torch.Tensor.normal_, lambda x: (x.clone(), 1.0, 2.0), {}),
    "uniform_": (torch.Tensor.uniform_, lambda x: (x.clone(), 1.0, 2.0), {}),
    "bernoulli_ each": (torch.Tensor.bernoulli_, lambda x: (x.clone(), x.sigmoid()), {}),
    "dropout of sequences": (F.dropout, lambda x: (torch.ones(8, len(x), 5), 0.4, True), {}),
    "normal of sequences": (torch.randn_like, lambda x: (torch.ones(8, len(x), 5),), {}),
    "randn of sequences": (torch.randn, lambda x: (8, len(x), 5), {}),
    "dropout": (F.dropout, lambda x: (x, 0.4, True), {}),
}


def drawn(name: str, x: torch.Tensor, first: int) -> Any:
    func, arguments, options = DRAWS[name]
    args = arguments(x)
    assert is_random(func, args, options)
    return Chance(5, 7, first, len(x)).call((1, 0, 2, 3), func, args, options)


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_draws_the_same_in_any_company(name: str) -> None:
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
    together = drawn(name, x, 0)
    for cuts in ((0, 4, 6), (0, 1, 2, 3, 4, 5, 6)):
        parts = [drawn(name, x[a:b], a) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat(parts, int("sequences" in name)), together)
    assert len({tuple(row.flatten().tolist()) for row in together}) > 1


def test_draws_are_from_their_distributions() -> None:
    x = torch.zeros(400, 100)
    assert abs(float(drawn("rand", x, 0).mean()) - 0.5) < 0.02
    normal = drawn("normal_", x, 0)
    assert abs(float(normal.mean()) - 1) < 0.05 and abs(float(normal.std()) - 2) < 0.05
    numbers = drawn("randint", x, 0)
    assert numbers.dtype == torch.int64 and set(numbers.unique().tolist()) == {3, 4, 5, 6, 7, 8}
    below = drawn("randint below", x, 0)
    assert below.dtype == torch.float32 and set(below.unique().tolist()) == set(range(9))


class Products(TorchDispatchMode):
    """Counts products with weights."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_each_sample_is_attention_of_all(masked: bool, weights: bool) -> None:
    """With the dropout all but off: what is drawn for each sample must leave attention as torch has it, in one call."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=1e-12).double()
    x = torch.randn(5, SAMPLES, 8, dtype=torch.float64)
    options: dict[str, Any] = {"need_weights": weights}
    if masked:
        padding = torch.arange(5)[None] >= torch.arange(1, SAMPLES + 1)[:, None].clamp(max=5)
        options |= {"key_padding_mask": padding, "attn_mask": torch.randn(2 * SAMPLES, 5, 5, dtype=torch.float64)}
    want = layer(x, x, x, **options)

    class Drawn(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.multi_head_attention_forward:
                self.seen += 1
                return Chance(0, 0, 0, SAMPLES).call((0, 1), func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Drawn() as mode, Products() as products:
        got = layer(x, x, x, **options)
    assert mode.seen == 1 and products.seen == 2, "of what goes in and what comes out"
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None) == (not weights and b is got[1])
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


class Noisy(nn.Module):
    """What people draw: noise of a diffusion and its time, of a VAE; attention with dropout; a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.across = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        x = x + noise * time[:, None, None] / 10
        h = self.inside(x) * torch.rand(len(x), 1, 1)
        h = self.across(h.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1)
        mask = torch.bernoulli(torch.full(h.shape, 0.5, dtype=h.dtype))
        return (self.out(h * mask) - noise).square()


def test_training_with_noise_does_not_depend_on_micro_batches() -> None:
    x = torch.randn(SAMPLES, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = []
    for count in (1, 2, 4, 6):
        torch.manual_seed(0)
        net = Noisy().double()
        fixed = {"num_micro_batches": count}
        plan = headway.plan(net, lambda m, b: m(b).mean(), x, cluster="1xcpu:4GiB", fixed=fixed, verify=False)
        model = ParallelModel(net, lambda m, b: m(b).mean(), plan, World())
        losses = [float(model.forward_backward(x)) for _ in range(2)]
        seen.append((losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    for losses, gradients in seen[1:]:
        assert losses == pytest.approx(seen[0][0], rel=1e-12)
        for a, b in zip(gradients, seen[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("text", ["1", "2", "0::1", "0:2:", "1:2:", "2::1"])
def test_rows_say_which_numbers_are_whose(text: str) -> None:
    """Samples lie along any dim, with other things before and behind them in it."""
    rows = Rows.parse(text)
    calls: dict[str, tuple[Any, Callable[[torch.Size], tuple[Any, ...]]]] = {
        "dropout": (F.dropout, lambda shape: (torch.ones(shape), 0.4, True)),
        "dropout_": (F.dropout, lambda shape: (torch.ones(shape), 0.4, True, True)),
        "rand": (torch.rand, lambda shape: (shape,)),
        "normal": (torch.normal, lambda shape: (1.0, 2.0, shape)),
        "normal_": (torch.Tensor.normal_, lambda shape: (torch.empty(shape),)),
        "randn_like": (torch.randn_like, lambda shape: (torch.empty(shape),)),
        "bernoulli": (torch.bernoulli, lambda shape: (torch.full(shape, 0.5),)),
    }
    outer, inner = rows.outer or 4, rows.inner or 4

    def draw(name: str, first: int, stop: int) -> torch.Tensor:
        shape = [8, 8, 8]
        shape[rows.dim] = outer * (stop - first) * inner
        func, arguments = calls[name]
        result = Chance(5, 7, first, stop - first).call((1, 0), func, arguments(torch.Size(shape)), {}, rows)
        assert list(result.shape) == shape
        return result.unflatten(rows.dim, (outer, stop - first, inner))  # type: ignore[no-any-return]

    for name in calls:
        together = draw(name, 0, SAMPLES)
        parts = [draw(name, a, b) for a, b in ((0, 1), (1, 4), (4, 6))]
        assert torch.equal(torch.cat(parts, rows.dim + 1), together), name
        assert together.select(rows.dim + 1, 0).ne(together.select(rows.dim + 1, 1)).any()
        assert together.select(rows.dim + 1, 0).unique().numel() > 1


@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("parts", [(1, 3), (3, 1), (2, 2)])
def test_attention_of_windows(parts: tuple[int, int], need: bool) -> None:
    """Several sequences of each sample in one dim, with masks for each and for each head."""
    outer, inner = parts
    torch.manual_seed(0)
    layer, many = nn.MultiheadAttention(8, 2, dropout=0.5).double(), outer * inner
    x = torch.randn(4, many * SAMPLES, 8, dtype=torch.float64)
    padding = torch.rand(many * SAMPLES, 4) > 2.0
    mask = torch.randn(2 * many * SAMPLES, 4, 4, dtype=torch.float64)

    def attend(first: int, stop: int) -> torch.Tensor:
        def own(tensor: torch.Tensor, dim: int, inside: int = inner) -> torch.Tensor:
            return (
                tensor.unflatten(dim, (outer, SAMPLES, inside))
                .narrow(dim + 1, first, stop - first)
                .flatten(dim, dim + 2)
            )

        class Drawn(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is F.multi_head_attention_forward:
                    rows = Rows("sample", 1) if outer == 1 else Rows("sample", 1, outer)
                    return Chance(0, 0, first, stop - first).call((0, 1), func, args, kwargs or {}, rows)
                return func(*args, **(kwargs or {}))

        with Drawn():
            given = own(x, 1)
            masks = {"key_padding_mask": own(padding, 0), "attn_mask": own(mask, 0, 2 * inner)}
            out, weights = layer(given, given, given, need_weights=need, **masks)
        sizes = (outer, stop - first, inner)
        if not need:
            return out.unflatten(1, sizes).flatten(4).movedim(2, 0).flatten(1)
        return torch.cat([out.unflatten(1, sizes).flatten(4).movedim(2, 0).flatten(1),
                          weights.unflatten(0, sizes).movedim(1, 0).flatten(1)], 1)  # fmt: skip

    together = attend(0, SAMPLES)
    torch.testing.assert_close(torch.cat([attend(0, 2), attend(2, 6)]), together, rtol=1e-9, atol=1e-12)


def test_a_plan_is_for_training_whatever_mode_the_model_is_in() -> None:
    """As `from_pretrained` gives models: in eval mode, in which nothing draws."""
    x = torch.randn(SAMPLES, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def first_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)[..., 0].square().mean()  # type: ignore[no-any-return]

    losses = []
    for count in (1, 3):
        torch.manual_seed(0)
        net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double().eval()
        fixed = {"num_micro_batches": count}
        plan = headway.plan(net, first_square, x, cluster="1xcpu:4GiB", fixed=fixed, verify=False)
        assert not any(module.training for module in net.modules())
        model = ParallelModel(net, first_square, plan, World())
        losses.append([float(model.train(mode).forward_backward(x)) for mode in (True, False)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mul(torch.arange(6)).mean()


def test_attention_draws_alike_whether_backward_is_split_or_not() -> None:
    found = []
    for schedule in ("gpipe", "zero_bubble"):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True).double()
        batch = torch.randn(4, 3, 6, dtype=torch.float64)
        fixed = {"num_micro_batches": 2, "schedule": schedule}
        plan = headway.plan(model, mean_square, batch, cluster="1xcpu:4GiB", fixed=fixed)
        found.append(float(ParallelModel(model, mean_square, plan, World()).forward_backward(batch)))
    assert found[0] == found[1]
