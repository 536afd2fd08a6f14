"""Codecs: what arrives is within the stated bound of what was sent, whatever was sent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.collective.blocks import INT4_BLOCK
from headway.collective.blocks import INT8_BLOCK as BLOCK
from headway.collective.codec import CODECS, Codec
from headway.planner.wire import PARTS

ALL = [pytest.param(codec, id=name) for name, codec in CODECS.items()]
SIZES = st.sampled_from([1, 7, INT4_BLOCK - 1, INT4_BLOCK, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 2000])
KINDS = {
    "normal": lambda size: torch.randn(size),
    "uniform": lambda size: torch.rand(size) * 2 - 1,
    "heavy-tailed": lambda size: torch.randn(size) / torch.rand(size).clamp(min=1e-6) ** 2,
    "all magnitudes": lambda size: torch.randn(size) * torch.exp(torch.empty(size).uniform_(-80, 80)),
    "one outlier": lambda size: torch.randn(size).index_fill_(0, torch.tensor([size // 2]), 1e6),
    "equal": lambda size: torch.full((size,), 0.3),
    "sparse": lambda size: torch.randn(size) * (torch.rand(size) < 0.01),
    "subnormal": lambda size: torch.randn(size) * 1e-41,
    "zero": torch.zeros,
    "largest": lambda size: torch.full((size,), 3.38e38) * torch.where(torch.rand(size) < 0.5, 1.0, -1.0),
}


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return what arrives when `values` are sent."""
    scratch = torch.empty(-(-values.numel() // BLOCK) * BLOCK)
    message = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, message, scratch)
    arrived = torch.full_like(values, 7.0)
    codec.decode(message, arrived, scratch)
    # Adding to something is decoding and adding.
    added = torch.ones_like(values)
    codec.accumulate(message, added, scratch)
    torch.testing.assert_close(added, 1 + arrived, rtol=1e-6, atol=0, equal_nan=True)
    return arrived


@pytest.mark.parametrize("codec", ALL)
@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=SIZES,
    seed=st.integers(0, 1 << 20),
    exponent=st.sampled_from([0, -3, -8, -20, -37, 5, 30]),
    odd=st.lists(st.tuples(st.integers(0, 1999), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=4),
)
def test_error_is_within_the_bound(
    codec: Codec, kind: str, size: int, seed: int, exponent: int, odd: list[tuple[int, float]]
) -> None:
    torch.manual_seed(seed)
    values = KINDS[kind](size)
    if kind not in ("largest", "subnormal", "all magnitudes"):
        values = values * 10.0**exponent
    values = torch.nan_to_num(values, posinf=3e38, neginf=-3e38)
    for place, value in odd:
        values[place % size] = value
    before = values.clone()
    arrived = through(codec, values)
    torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)  # sending changes nothing
    finite = torch.isfinite(values)
    torch.testing.assert_close(arrived[~finite], values[~finite], rtol=0, atol=0, equal_nan=True)
    error = (arrived.double() - values.double()).abs()[finite]
    bound = codec.bound(values).double()[finite]
    assert bool((error <= bound).all()), f"{(error - bound).max():g} above the bound"
    assert bool(torch.isfinite(bound).all())


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("scale", [1e-8, 1e-30, 1.0, 1e38])
def test_the_bound_promises_something(codec: Codec, scale: float) -> None:
    """On plain gradients of any size, tiny ones too, the bound is a small part of the largest value."""
    values = torch.rand(4 * BLOCK) * scale
    part = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 253, "int4": 1 / 13.9}[codec.name]
    assert codec.bound(values).max() <= 1.001 * part * values.max() + 1e-37
    assert codec.exact == (codec.bound(values).max() == 0)
    assert through(codec, values).max() > 0.99 * values.max()


@pytest.mark.parametrize("codec", ALL)
def test_what_arrives_has_a_stated_part_of_the_size(codec: Codec) -> None:
    """On normal values, the error's root mean square as a part of theirs."""
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 1e-4
    error = (through(codec, values) - values).norm() / values.norm()
    least, most = {
        "fp32": (0, 0), "fp16": (1e-4, 3e-4), "bf16": (1e-3, 2e-3), "int8": (0.006, 0.008), "int4": (0.1, 0.12),
    }[codec.name]  # fmt: skip
    assert least <= error <= most


@pytest.mark.parametrize("codec", ALL)
def test_bytes_on_the_wire(codec: Codec) -> None:
    count = 1 << 20
    per_value = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK, "int4": 0.5 + 4 / INT4_BLOCK}[codec.name]
    assert codec.wire_bytes(count) / count == pytest.approx(per_value, rel=1e-4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks_keep_their_own_scales(name: str) -> None:
    """A block of tiny values beside one of huge values keeps its digits; a block of zeros stays zero."""
    values = torch.cat([torch.full((BLOCK,), 1e30), torch.linspace(-1e-8, 1e-8, BLOCK), torch.zeros(BLOCK)])
    arrived = through(CODECS[name], values)
    step = 1e-8 / {"int8": 253, "int4": 13.9}[name]
    torch.testing.assert_close(arrived[BLOCK : 2 * BLOCK], values[BLOCK : 2 * BLOCK], rtol=0, atol=step)
    assert bool((arrived[2 * BLOCK :] == 0).all())


def test_half_precision_keeps_what_torchs_hook_loses() -> None:
    """Gradients of 1e-9 beside 1e-4 are below half precision's least number, not below a scaled one's."""
    values = torch.cat([torch.full((8,), 1e-4), torch.full((8,), 1e-9)])
    assert bool((values.half()[8:] == 0).all())
    torch.testing.assert_close(through(CODECS["fp16"], values), values, rtol=2.0**-11, atol=0)


def test_the_planner_knows_the_same_codecs() -> None:
    assert set(PARTS) == set(CODECS)
    for name, part in PARTS.items():
        assert CODECS[name].wire_bytes(1 << 20) / (4 << 20) == pytest.approx(part, rel=1e-4)
