"""Randomness: the same dropout masks under every plan, because each sample draws its own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from headway.collective.world import World
from headway.graph.chance import DROPPED_BY_SAMPLE, RECURRENT, argument, seed_torch
from headway.graph.host import seed_host, skip
from headway.graph.model import Position
from headway.graph.rows import MIXED, Rows, guess
from headway.graph.walk import short_name, tensors_of
from headway.run.draws import by_head, by_layer, by_sample, put, take


@dataclass(frozen=True)
class Chance:
    """What decides the random numbers of one micro-batch: the seed, the step and which samples of the global batch.

    A draw for sample i at a place of the program depends on (seed, step, place, i) alone, so it is the same in
    whichever micro-batch, copy or stage the sample runs.
    """

    seed: int
    step: int | str  # "7, evaluation 2" between steps
    first: int  # number of the first sample within the global batch
    samples: int

    def number(self, *parts: object) -> int:
        """Mix the seed, the step and `parts` into 63 bits."""
        text = repr((self.seed, self.step, *parts)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def begin(self) -> None:
        """Seed the generators of torch for one pass of this micro-batch through one stage."""
        seed_torch(self.number("begin", self.first))

    def host(self, gap: int, whose: Sequence[str]) -> None:
        """Seed the generators of Python and numpy for one gap between calls.

        Every stage runs the program from its start, so code outside torch that draws numbers draws the same ones.
        `whose` is what `headway.graph.host.whose` found for each gap: numbers that do not follow the samples are the
        same for each micro-batch, as one process draws them once; of those that do, the other samples' are passed by.
        """
        usual = whose[0] if len(set(whose)) == 1 else "? ?"
        words = (whose[gap] if gap < len(whose) else usual).split()
        keys = [self.number("host", gap, *((self.first,) if word == "?" else ())) for word in words]
        seed_host(*keys)
        skip(*(0 if word == "?" else int(word) * self.first for word in words))

    def call(
        self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows | None = None,
        order: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        """Compute one random torch call.

        Each sample draws its own numbers where `rows` says which are whose; where it does not, the shape does, as far
        as it can. What belongs to all samples is drawn as one process draws it, once: the same for each micro-batch.
        Any other call draws from a generator seeded by its place, the step and its first sample. `order` are the
        samples of sequences that are packed by their length, as numbers within the micro-batch.
        """
        name = short_name(func)
        shape = _shape(func, args, kwargs)
        if rows is None or (rows.whose == "sample" and rows.parts(shape, self.samples) is None):
            rows = self._guess(name, args, shape)
        if name in RECURRENT:
            done = by_layer(func, args, kwargs, _Between(self, position, rows, order))
            if done is not None:
                return done
        elif rows.whose == "sample":
            if name in DROPPED_BY_SAMPLE:
                return self._dropout(position, name, rows, args, kwargs)
            if name == "multi_head_attention_forward" and rows.dim == 1 and len(shape) == 3:
                return self._heads(position, rows, func, args, kwargs)
            if name == "scaled_dot_product_attention" and rows.dim < len(shape) - 2:
                return self._attention(position, rows, args, kwargs)
            own = by_sample(
                name, func, args, kwargs, self.samples, rows,
                lambda i: seed_torch(self.number(position, "sample", self.first + i)),
            )  # fmt: skip
            if own is not None:
                return own[0]
        seed_torch(self.number(position) if rows.whose == "all" else self.number(position, self.first))
        return func(*args, **kwargs)

    def inside(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call whose inside is not followed: what it draws is seeded by its place and its first sample."""
        seed_torch(self.number(position, self.first))
        return func(*args, **kwargs)

    def keep(self, place: object, shape: torch.Size, p: float, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Draw which elements stay: ones and zeros of `shape`, scaled by 1 / (1 - p)."""
        mask = torch.empty(shape, dtype=like.dtype, device=like.device)
        generator = torch.Generator(device=like.device)
        parts = rows.parts(shape, self.samples)
        if parts is None:
            generator.manual_seed(self.number(place) if rows.whose == "all" else self.number(place, self.first))
            mask.bernoulli_(1.0 - p, generator=generator)
            return mask.div_(1.0 - p) if p < 1 else mask
        for number in range(self.samples):
            generator.manual_seed(self.number(place, "sample", self.first + number))
            own = take(mask, rows.dim, parts, self.samples, number)
            if own.is_contiguous() and parts[0] == 1:
                own.bernoulli_(1.0 - p, generator=generator)
                continue
            # an own tensor where a sample does not lie in one piece: numbers are drawn in the order of memory
            drawn = torch.empty_like(own, memory_format=torch.contiguous_format)
            put(mask, rows.dim, parts, self.samples, number, drawn.bernoulli_(1.0 - p, generator=generator))
        return mask.div_(1.0 - p) if p < 1 else mask

    def _guess(self, name: str, args: Any, shape: torch.Size) -> Rows:
        """Say whose numbers a call draws that was not seen when the program was recorded."""
        dim = {"multi_head_attention_forward": 1}.get(name)
        if name in RECURRENT:
            dim = 0 if args[8] and not isinstance(args[3], tuple | list) else 1
        if dim is not None and len(shape) == 3 and shape[dim] % self.samples == 0:
            return Rows("sample", dim)
        return guess(shape, self.samples)

    def _dropout(self, position: Position, name: str, rows: Rows, args: Any, kwargs: Any) -> torch.Tensor:
        given = argument(args, kwargs, 0, "input", None)
        p = float(argument(args, kwargs, 1, "p", 0.5))
        inplace = name == "dropout_" or bool(argument(args, kwargs, 3, "inplace", False))
        # the d-dimensional kinds drop whole channels: [samples, channels, ...], or [channels, ...] of one sample
        whole = {"dropout": given.dim(), "dropout_": given.dim()}.get(name, 2)
        if (name, given.dim()) in (("dropout1d", 2), ("dropout3d", 4)):
            whole = 1
        shape = torch.Size((*given.shape[:whole], *(1,) * (given.dim() - whole)))
        mask = self.keep(position, shape, p, given, rows)
        return given.mul_(mask) if inplace else given * mask

    def _heads(self, position: Position, rows: Rows, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention of nn.MultiheadAttention for all samples at once: queries are [length, samples, width]."""
        outer, _ = rows.parts(_shape(func, args, kwargs), self.samples) or (1, 1)
        first = Rows("sample", 0, outer)

        def drop(weights: torch.Tensor, p: float) -> torch.Tensor:
            return weights * self.keep(position, weights.shape, p, weights, first)

        return by_head(func, args, kwargs, drop, lambda *a, **k: self._attention(position, first, a, k))

    def _attention(self, position: Position, rows: Rows, args: Any, kwargs: Any) -> torch.Tensor:
        """Attention with dropped weights, softmax(q k' / sqrt(d) + mask) as torch documents it."""
        query, key, value = (argument(args, kwargs, i, name, None) for i, name in enumerate(("query", "key", "value")))
        mask = argument(args, kwargs, 3, "attn_mask", None)
        p = float(argument(args, kwargs, 4, "dropout_p", 0.0))
        scale = kwargs.get("scale") or query.shape[-1] ** -0.5
        if kwargs.get("enable_gqa"):
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scores = query @ key.transpose(-2, -1) * scale
        if argument(args, kwargs, 5, "is_causal", False):
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        weights = functional.softmax(scores, dim=-1)
        return weights * self.keep(position, weights.shape, p, weights, rows) @ value


@dataclass(frozen=True)
class _Between:
    """Drops from what goes from one layer of an LSTM, GRU or RNN to the next."""

    chance: Chance
    position: Position
    rows: Rows
    order: Sequence[int] | None

    def __call__(self, x: torch.Tensor, layer: int, p: float, sizes: torch.Tensor | None) -> torch.Tensor:
        """Drop from `x`, for each sample; of packed sequences `sizes` are how many there are at each step."""
        chance, place = self.chance, (self.position, "layer", layer)
        if sizes is None:
            return x * chance.keep(place, x.shape, p, x, self.rows)
        steps = sizes.tolist()
        if steps[0] != chance.samples:
            return x * chance.keep(place, x.shape, p, x, MIXED)
        starts = torch.tensor([0, *steps[:-1]]).cumsum(0)
        mask = torch.empty_like(x)
        generator = torch.Generator(device=x.device)
        for row, number in enumerate(range(steps[0]) if self.order is None else self.order):
            length = sum(step > row for step in steps)
            generator.manual_seed(chance.number(place, "sample", chance.first + number))
            own = torch.empty(length, x.shape[1], dtype=x.dtype, device=x.device)
            mask[starts[:length].to(x.device) + row] = own.bernoulli_(1.0 - p, generator=generator)
        return x * (mask.div_(1.0 - p) if p < 1 else mask)


def _shape(func: Any, args: Any, kwargs: Any) -> torch.Size:
    """Give the shape of what a call draws numbers for: its first tensor, else what it makes."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].shape
    tensors = tensors_of((args, kwargs), [])
    if tensors:
        return tensors[0].shape
    plain = {key: value for key, value in kwargs.items() if key not in ("generator", "out", "pin_memory")}
    made = func(*args, **{**plain, "device": "meta"})
    return made.shape if isinstance(made, torch.Tensor) else torch.Size()


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed torch's, Python's and numpy's generators inside the block, and put their states back after it."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        seed_torch(number)
        seed_host(number)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy and numpy_state is not None:
                numpy.random.set_state(numpy_state)


def same_generators(world: World) -> None:
    """Set the generators of torch, Python and numpy to rank 0's states, so that all ranks shuffle alike."""
    if world.size == 1:
        return
    numpy = sys.modules.get("numpy")
    mine = (torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)
    torch_state, python_state, numpy_state = world.broadcast_object(mine)
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if numpy and numpy_state is not None:
        numpy.random.set_state(numpy_state)
