"""Reducer on real processes: its gradients are those of one process."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from headway.collective.reduce import Reducer
from headway.collective.world import PeerError, World
from headway.errors import RankError
from tests.several.ranks import SOON, on_ranks, outcomes_on_ranks

MODES = {"direct": 0, "mixed": 1 << 10, "flat": 1 << 40}  # direct_bytes


class Net(nn.Module):
    """A small network with what makes reduction hard: dtypes, strides, unused and frozen parameters, a tied one."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.late = nn.Linear(6, 6)  # registered first, used last
        self.embedding = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(6, 6)
        self.scalar = nn.Parameter(torch.ones(()))
        self.to(dtype)
        self.single = nn.Parameter(torch.full((6,), 0.5, dtype=torch.float32))

    def forward(self, x: torch.Tensor, sometimes: bool = False) -> torch.Tensor:
        h = self.embedding(x)
        h = h + self.conv(h[:, None]).mean(1)
        h = h + self.second(torch.tanh(self.first(h))) * self.single
        if sometimes:
            h = h + self.sometimes(h)
        h = self.late(self.frozen(h)) * self.scalar
        return (h @ self.embedding.weight.T).logsumexp(-1).mean()


def batches(size: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 11, (2, 5), generator=generator) for _ in range(size * count)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def alone(size: int, micros: int, calls: int, sometimes: tuple[int, ...]) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the sum over calls of the mean over all micro-batches, in one process."""
    model = Net()
    for _ in range(calls):
        for number, batch in enumerate(batches(size, micros)):
            (model(batch, number // micros in sometimes) / (size * micros)).backward()
    return gradients(model)


def reduced(world: World, *setting: Any) -> dict[str, dict[str, torch.Tensor | None]]:
    return {mode: reduced_in(world, mode, *setting) for mode in MODES}


def reduced_in(
    world: World, mode: str, micros: int, calls: int, steps: int, sometimes: tuple[int, ...], set_to_none: bool
) -> dict[str, torch.Tensor | None]:
    model = Net()
    group = world.group(range(world.size))
    reducer = Reducer(world, group, dict(model.named_parameters()), direct_bytes=MODES[mode], bucket_bytes=4096)
    mine = batches(world.size, micros)[world.rank * micros : (world.rank + 1) * micros]
    for step in range(steps):
        if step:
            model.zero_grad(set_to_none=set_to_none)
        for call in range(calls):
            scales = (1.0 / (world.size * micros), 1.0) if (step + call) % 2 else (1.0 / world.size, 1.0 / micros)
            reducer.begin(scales[0])
            for number, batch in enumerate(mine):
                if number == micros - 1:
                    reducer.arm()
                model(batch, world.rank in sometimes).backward()
            reducer.finish(scales[1])
        if step == 0:
            assert set(reducer.unused) == {"never.weight", "never.bias"} | (
                set() if sometimes else {"sometimes.weight", "sometimes.bias"}
            )
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    orders = world.gather_objects(reducer.buckets)
    assert all(order == orders[0] for order in orders)
    return gradients(model)


@pytest.mark.parametrize(
    ("size", "micros", "calls", "sometimes", "set_to_none"),
    [
        (2, 1, 1, (), True),
        (2, 3, 2, (1,), True),
        (2, 2, 2, (0,), False),
        (3, 1, 1, (2,), True),
        (3, 2, 2, (), False),
    ],
)
def test_gradients_equal_one_process(
    size: int, micros: int, calls: int, sometimes: tuple[int, ...], set_to_none: bool
) -> None:
    answers = on_ranks(size, reduced, micros, calls, 3, sometimes, set_to_none)
    expected = alone(size, micros, calls, sometimes)
    for mode in MODES:
        for name, want in expected.items():
            got = answers[0][mode][name]
            for answer in answers[1:]:
                other = answer[mode][name]
                assert other is None if got is None else torch.equal(other, got), (mode, name)
            if want is None:
                assert got is None, (mode, name)
            else:
                tolerance = 1e-12 if want.dtype == torch.float64 else 1e-6
                torch.testing.assert_close(
                    got, want, rtol=tolerance, atol=tolerance, msg=lambda text, where=(mode, name): f"{where}: {text}"
                )


def coded(world: World, codec: str) -> dict[str, Any]:
    return {mode: coded_in(world, codec, mode) for mode in MODES}


def coded_in(world: World, codec: str, mode: str) -> Any:
    """Two steps with a codec, gradients accumulating over calls and micro-batches; rank 1 uses one parameter more."""
    model = Net(torch.float32)
    model.late.double()
    plain = model.late.forward
    model.late.forward = lambda h: plain(h.double()).float()  # type: ignore[method-assign]
    reducer = Reducer(
        world, world.everyone, dict(model.named_parameters()), direct_bytes=MODES[mode], bucket_bytes=8192, codec=codec
    )
    mine = batches(world.size, 2)[world.rank * 2 : (world.rank + 1) * 2]
    for _ in range(2):
        model.zero_grad()
        for _ in range(2):
            reducer.begin(1.0 / world.size)
            for number, batch in enumerate(mine):
                if number == 1:
                    reducer.arm()
                model(batch, world.rank == 1).backward()
            reducer.finish(0.5)
    assert set(reducer.unused) == {"never.weight", "never.bias"}
    reducer.close()
    return gradients(model), reducer.exact


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_gradients_with_a_codec_are_near_and_the_same_on_every_rank(size: int, codec: str) -> None:
    answers = on_ranks(size, coded, codec)
    expected = alone(size, 2, 2, (1,))
    # Of the largest value of a parameter: each of `size` parts is rounded, then the sum; the parts may cancel.
    part = (size + 2) * {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}[codec]
    for mode in MODES:
        found, exact = answers[0][mode]
        assert len(exact) == 1 and "late.weight" in exact[0] and "float64" in exact[0] and codec in exact[0]
        rounded = 0
        for name, want in expected.items():
            got = found[name]
            assert all(torch.equal(other[mode][0][name], got) for other in answers[1:] if got is not None), name
            if want is None:
                assert got is None, name
            else:
                want = want.to(got.dtype)
                least = 1e-5 if name.startswith("late") else part
                assert (got - want).abs().max() <= least * max(want.abs().max(), 1e-3), (mode, name)
                rounded += not torch.allclose(got, want, rtol=1e-6, atol=1e-9)
        assert rounded > 3  # a codec was at work at all


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="no codec 'int3': one of fp32.*powersgd:RANK"):
        Reducer(World(), World().everyone, {}, codec="int3")


def as_ddp(world: World) -> bool:
    """Compare with torch's DDP, bit for bit: two ranks leave one order of summing."""
    return all(as_ddp_in(world, mode, dtype) for mode in MODES for dtype in (torch.float32, torch.float64))


def as_ddp_in(world: World, mode: str, dtype: torch.dtype) -> bool:
    batch = batches(world.size, 1)[world.rank]
    plain, other = Net(dtype), Net(dtype)
    peer = nn.parallel.DistributedDataParallel(other, find_unused_parameters=True)
    reducer = Reducer(world, world.everyone, dict(plain.named_parameters()), direct_bytes=MODES[mode])
    for _ in range(3):
        plain.zero_grad()
        peer.zero_grad()
        peer(batch).backward()
        reducer.begin(0.5)
        reducer.arm()
        plain(batch).backward()
        reducer.finish()
        for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
    return True


def test_two_ranks_equal_ddp_bit_for_bit() -> None:
    assert all(on_ranks(2, as_ddp))


def learns_order(world: World) -> list[tuple[tuple[str, ...], ...]]:
    model = Net()
    reducer = Reducer(world, world.everyone, dict(model.named_parameters()), direct_bytes=0)
    orders = [reducer.buckets]
    for _ in range(2):
        reducer.begin()
        reducer.arm()
        model(batches(1, 1)[0], sometimes=world.rank == 1).backward()
        reducer.finish()
        orders.append(reducer.buckets)
    return orders


def test_the_order_is_that_in_which_gradients_came() -> None:
    first, second = on_ranks(2, learns_order)
    assert first == second
    before, after, later = first
    assert after == later != before
    names = [bucket[0] for bucket in after if bucket]
    assert names.index("late.weight") < names.index("second.weight") < names.index("conv.weight")
    assert before.index(("late.weight",)) > before.index(("conv.weight",))
    assert sorted(names) == sorted(name for name, p in Net().named_parameters() if p.requires_grad)


class Doubled(torch.autograd.Function):
    """Takes a weight and has no gradient for it, as a quantiser whose scale is not learned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] * 2, None


def without_gradients(world: World, idle: int) -> dict[str, Any]:
    """Make three steps, in the first of which one rank has no samples; give the gradients, and what was learned."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "scale": nn.Linear(2, 2)}).double()
    reducer = Reducer(world, world.everyone, dict(model.named_parameters()), direct_bytes=0, bucket_bytes=64)
    for step in range(3):
        model.zero_grad()
        reducer.begin()
        reducer.arm()
        if step or world.rank != idle:
            x = torch.full((1, 2), float(world.rank + step)).double()
            (Doubled.apply(model["a"](x), model["scale"].weight) + model["b"](x)).sum().backward()
        reducer.finish()
    learned = reducer.state_dict()["order"][0]
    return {"learned": learned, **gradients(model)}


@pytest.mark.several
@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_without_samples_in_the_first_step_and_a_gradient_of_nothing(idle: int) -> None:
    first, second = on_ranks(2, without_gradients, idle, deadline=10.0)
    assert first.pop("learned") == second.pop("learned") == "b.bias"
    for name, gradient in first.items():
        want = {"a.weight": 10.0, "a.bias": 4.0, "b.weight": 5.0, "b.bias": 2.0}.get(name)
        assert (gradient is None) == (second[name] is None) == (want is None)
        assert want is None or torch.equal(gradient, torch.full_like(gradient, want)), name


def aliases(world: World) -> None:
    """Gradients whose memory autograd shares with others must not be reduced in place."""
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    c = nn.Parameter(torch.ones(1, 2, 2))
    reducer = Reducer(world, world.everyone, {"a": a, "b": b, "c": c}, direct_bytes=0)
    weight = torch.arange(4.0).view(2, 2) * (world.rank + 1)
    for _ in range(2):
        a.grad = b.grad = c.grad = None
        reducer.begin()
        reducer.arm()
        ((a.view(2, 2) + b.view(2, 2) + c[0]) * weight).sum().backward()
        reducer.finish(0.5)
        for p in (a, b, c):
            assert p.grad is not None
            assert p.grad.flatten().tolist() == [0.0, 1.5, 3.0, 4.5]


def test_gradients_that_share_memory() -> None:
    on_ranks(2, aliases)


def in_place(world: World) -> bool:
    model = nn.Linear(600, 600)
    reducer = Reducer(world, world.everyone, dict(model.named_parameters()))
    where = []
    model.weight.register_post_accumulate_grad_hook(lambda p: where.append(p.grad.data_ptr()))
    reducer.begin()
    reducer.arm()
    model(torch.ones(1, 600)).sum().backward()
    reducer.finish(0.5)
    return model.weight.grad.data_ptr() == where[0]


def test_large_gradients_are_not_copied() -> None:
    assert on_ranks(2, in_place) == [True, True]


def two_backwards(world: World) -> None:
    """A parameter that only an earlier micro-batch used, and a step in which no backward ran at all."""
    for mode in MODES:
        two_backwards_in(world, mode)


def two_backwards_in(world: World, mode: str) -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    reducer = Reducer(world, world.everyone, {"a": a, "b": b}, direct_bytes=MODES[mode])
    for _ in range(2):
        a.grad = b.grad = None
        reducer.begin()
        (a * b * 2).sum().backward()
        reducer.arm()
        (a * 3).sum().backward()
        reducer.finish()
        assert a.grad.tolist() == [10.0] * 3 and b.grad.tolist() == [4.0] * 3
    a.grad = b.grad = None
    reducer.begin()
    if world.rank == 0:
        (a * 3).sum().backward()  # not armed: taken by finish
    reducer.finish()
    assert a.grad.tolist() == [3.0] * 3 and b.grad is None and reducer.unused == ("b",)


def test_parameters_of_earlier_micro_batches() -> None:
    on_ranks(2, two_backwards)


def in_parts(world: World) -> dict[str, list[dict[str, torch.Tensor | None]]]:
    return {mode: in_parts_in(world, mode) for mode in MODES}


def in_parts_in(world: World, mode: str) -> list[dict[str, torch.Tensor | None]]:
    """Reduce two networks by one reducer, the second first, its biases complete before its last backward."""
    torch.manual_seed(2)
    model = nn.ModuleList([nn.Linear(4, 300), nn.Linear(4, 300)]).double()
    names = [[name for name, _ in model.named_parameters() if name.startswith(str(part))] for part in range(2)]
    group = world.group(range(world.size))
    reducer = Reducer(world, group, dict(model.named_parameters()), direct_bytes=MODES[mode], bucket_bytes=4096)
    found = []
    for step in range(3):
        model.zero_grad()
        reducer.begin()
        x = torch.full((2, 4), float(world.rank + step), dtype=torch.float64)
        for part in (0, 1):
            (model[part](x).sum() * (part + 1)).backward()
        for part in (1, 0):
            model[part].bias.requires_grad_(False)
            reducer.arm(names[part])
            (model[part](x).sum() * (part + 1)).backward()
            model[part].bias.requires_grad_(True)
            reducer.complete(names[part])
        reducer.finish()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_parts_are_reduced_when_each_is_complete(size: int) -> None:
    for by_mode in on_ranks(size, in_parts):
        for steps in by_mode.values():
            for step, found in enumerate(steps):
                total = sum(range(step, step + size))  # of x over the ranks
                for part in (0, 1):
                    weight, bias = found[f"{part}.weight"], found[f"{part}.bias"]
                    assert weight is not None and bias is not None
                    assert torch.equal(weight, torch.full_like(weight, 2 * 2 * total * (part + 1)))
                    assert torch.equal(bias, torch.full_like(bias, 2 * size * (part + 1)))


def tied(world: World) -> list[float | None]:
    """Ranks 0, 1 hold stage 0, ranks 2, 3 stage 1; `word` is on both stages, `rare` has a gradient on none."""
    data = [world.group([0, 1]), world.group([2, 3])]
    stages = [world.group([0, 2]), world.group([1, 3])]
    stage, copy = divmod(world.rank, 2)
    word, rare, own = (nn.Parameter(torch.ones(2)) for _ in range(3))
    reducer = Reducer(
        world,
        data[stage],
        {"rare": rare, f"own{stage}": own, "word": word},
        shared={"word": stages[copy], "rare": stages[copy]},
    )
    answers = []
    for _ in range(2):  # without zero_grad: accumulates
        reducer.begin()
        reducer.arm()
        use = word if world.rank != 3 else 1.0
        (own * use * 10.0**world.rank).sum().backward()
        reducer.finish(0.5)
        answers.append(word.grad.tolist())
    return [answers, own.grad.tolist(), rare.grad]


def test_tied_parameters_are_summed_over_stages() -> None:
    for rank, (word, own, rare) in enumerate(on_ranks(4, tied)):
        assert word == [[55.5] * 2, [111.0] * 2]
        assert own == [[11.0] * 2, [1100.0] * 2][rank // 2]
        assert rare is None


def test_one_process_is_plain_autograd() -> None:
    model, plain = Net(), Net()
    reducer = Reducer(World(), World().everyone, dict(model.named_parameters()))
    assert reducer.buckets == ()
    batch = batches(1, 1)[0]
    for step in range(3):
        reducer.begin()
        reducer.arm()
        model(batch).backward()
        reducer.finish()
        plain(batch).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), (name, step)
    before = gradients(model)
    reducer.begin()
    model(batch).backward()
    reducer.finish(0.25)
    torch.testing.assert_close(model.late.weight.grad, before["late.weight"] * (1 + 0.25 / 3))


def test_one_process_scales_gradients_that_share_memory_once() -> None:
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    reducer = Reducer(World(), World().everyone, {"a": a, "b": b})
    reducer.begin(0.5)
    ((a.view(2, 2) + b.view(2, 2)) * torch.ones(2, 2)).sum().backward()
    reducer.finish(0.5)
    assert a.grad.tolist() == b.grad.tolist() == [0.25] * 4


def refusals(world: World) -> list[str]:
    texts = []
    table = nn.Embedding(5, 3, sparse=True)
    reducer = Reducer(world, world.everyone, dict(table.named_parameters()))
    reducer.begin()
    reducer.arm()
    with pytest.raises(RankError) as caught:
        table(torch.tensor([1])).sum().backward()
    texts.append(str(caught.value))
    reducer.close()
    layers = nn.Sequential(*(nn.Linear(2, 2 if i or world.rank == 0 else 3) for i in range(2 + world.rank)))
    with pytest.raises(RankError) as caught:
        Reducer(world, world.everyone, dict(layers.named_parameters()))
    texts.append(str(caught.value))
    twice = nn.Parameter(torch.ones(2))
    reducer = Reducer(world, world.everyone, {"twice": twice})
    reducer.begin()
    reducer.arm()
    twice.sum().backward()
    with pytest.raises(RankError) as caught:
        twice.sum().backward()
    texts.append(str(caught.value))
    return texts


def test_refusals_name_the_parameter() -> None:
    for sparse, differs, twice in on_ranks(2, refusals):
        assert "the gradient of weight is sparse" in sparse and "sparse=False" in sparse
        assert "0.weight [2, 2] torch.float32 on the one and 0.weight [3, 2] torch.float32 on the other" in differs
        assert "twice got a second gradient" in twice


def dies_while_reducing(world: World) -> None:
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    reducer = Reducer(world, world.everyone, dict(model.named_parameters()))
    for step in range(100):
        reducer.begin()
        reducer.arm()
        if world.rank == 1 and step == 3:
            model[1].weight.register_post_accumulate_grad_hook(lambda _: os._exit(5))
        model(torch.ones(1, 600)).sum().backward()
        reducer.finish()


def test_a_rank_that_dies_in_a_reduction_is_named() -> None:
    outcomes = outcomes_on_ranks(3, dies_while_reducing, deadline=20.0)
    assert outcomes[1].code == 5
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, PeerError), outcome.trace
        assert outcome.error.consequence and 1 in outcome.error.peers
        assert outcome.seconds - outcomes[1].seconds < SOON


def stalls(world: World) -> None:
    layer = nn.Linear(400, 400)
    reducer = Reducer(world, world.everyone, dict(layer.named_parameters()))
    if world.rank == 1:
        time.sleep(2.5)
        os._exit(0)
    reducer.begin()
    reducer.arm()
    layer(torch.ones(1, 400)).sum().backward()
    reducer.finish()


def test_a_late_rank_is_named_with_the_bucket() -> None:
    error = outcomes_on_ranks(2, stalls, deadline=1.0)[0].error
    assert isinstance(error, PeerError) and error.kind == "late"
    assert "rank 1 did not answer within 1 s" in str(error) and "gradients of bias, weight (bucket 1 of 1)" in str(
        error
    )
