"""Randomness: the same dropout masks under every plan, because each sample draws its own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from headway.collective.world import World
from headway.graph.chance import DROPPED_BY_SAMPLE, argument, sample_dim
from headway.graph.model import Position
from headway.graph.walk import short_name
from headway.run.draws import by_sample


@dataclass(frozen=True)
class Chance:
    """What decides the random numbers of one micro-batch: the seed, the step and which samples of the global batch.

    A draw for sample i at a place of the program depends on (seed, step, place, i) alone, so it is the same in
    whichever micro-batch, copy or stage the sample runs.
    """

    seed: int
    step: int
    first: int  # number of the first sample within the global batch
    samples: int

    def number(self, *parts: object) -> int:
        """Mix the seed, the step and `parts` into 63 bits."""
        text = repr((self.seed, self.step, *parts)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def begin(self) -> None:
        """Seed the generators of Python, numpy and torch for one pass of this micro-batch through one stage.

        Every stage runs the program from its start, so code outside torch that draws numbers draws the same ones.
        """
        number = self.number("begin", self.first)
        random.seed(number)
        numpy = sys.modules.get("numpy")
        if numpy:
            numpy.random.seed(number % 2**32)
        seed_torch(number)

    def call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one random torch call.

        Each sample draws its own numbers, where the shape tells which are whose (`sample_dim`). Any other call draws
        from a generator seeded by its place, the step and its first sample.
        """
        name = short_name(func)
        if name in DROPPED_BY_SAMPLE:
            given = argument(args, kwargs, 0, "input", None)
            if sample_dim(given.shape, self.samples) is not None:
                return self._dropout(position, name, given, args, kwargs)
        if name == "scaled_dot_product_attention" and args and args[0].shape[0] % self.samples == 0:
            return self._attention(position, args, kwargs)
        done = by_sample(
            name, func, args, kwargs, self.samples,
            lambda i: seed_torch(self.number(position, "sample", self.first + i)),
        )  # fmt: skip
        if done is not None:
            return done[0]
        seed_torch(self.number(position, self.first))
        return func(*args, **kwargs)

    def keep(self, position: Position, shape: torch.Size, p: float, like: torch.Tensor) -> torch.Tensor:
        """Draw which elements stay: ones and zeros of `shape`, scaled by 1 / (1 - p)."""
        dim = sample_dim(shape, self.samples) or 0
        mask = torch.empty(shape, dtype=like.dtype, device=like.device)
        generator = torch.Generator(device=like.device)
        for i, own in enumerate(mask.chunk(self.samples, dim)):
            generator.manual_seed(self.number(position, "sample", self.first + i))
            # an own tensor where the samples do not lie in one piece: numbers are drawn in the order of memory
            own.copy_(
                torch.empty_like(own, memory_format=torch.contiguous_format).bernoulli_(1.0 - p, generator=generator)
            )
        return mask.div_(1.0 - p) if p < 1 else mask

    def _dropout(self, position: Position, name: str, given: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        p = float(argument(args, kwargs, 1, "p", 0.5))
        inplace = name == "dropout_" or bool(argument(args, kwargs, 3, "inplace", False))
        # the d-dimensional kinds drop whole channels: [samples, channels, ...]
        channels = name not in ("dropout", "dropout_")
        shape = given.shape[:2] + (1,) * (given.dim() - 2) if channels else given.shape
        mask = self.keep(position, torch.Size(shape), p, given)
        return given.mul_(mask) if inplace else given * mask

    def _attention(self, position: Position, args: Any, kwargs: Any) -> torch.Tensor:
        """Attention with dropped weights, softmax(q k' / sqrt(d) + mask) as torch documents it."""
        query, key, value = args[:3]
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
        return weights * self.keep(position, weights.shape, p, weights) @ value


def seed_torch(number: int) -> None:
    """Seed torch's own generators: the CPU's, and those of CUDA devices that are in use.

    `torch.manual_seed` notes a stack for each kind of device that is not: 350 us a call, where this takes 1.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed torch's, Python's and numpy's generators inside the block, and put their states back after it."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        seed_torch(number)
        random.seed(number)
        if numpy:
            numpy.random.seed(number % 2**32)
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
