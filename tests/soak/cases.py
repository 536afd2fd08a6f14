"""Cases: a random plan and a random course of training for a random program, from one integer and a number of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from headway.schedule.catalogue import CATALOGUE

ALONE = tuple(name for name, entry in CATALOGUE.items() if entry.allows(1))
SEVERAL = tuple(name for name, entry in CATALOGUE.items() if entry.allows(2))
OPTIMIZERS = ("sgd", "adamw", "foreach", "rmsprop")


@dataclass(frozen=True)
class Way:
    """How it is trained: decisions for `headway.plan`, `places` (fractions of the program) where it is cut."""

    fixed: tuple[tuple[str, Any], ...]
    stages: int
    places: tuple[float, ...] | None
    bucket_bytes: int | None
    verify: bool

    @property
    def data(self) -> int:
        """How many copies."""
        return int(dict(self.fixed)["data"])


@dataclass(frozen=True)
class Case:
    """One training: the program's seed, global batch, ways (one after the other, through checkpoints) and actions."""

    seed: int
    size: int
    samples: int
    optimizer: str
    ways: tuple[Way, ...]
    actions: tuple[tuple[Any, ...], ...]
    same_pieces: bool  # one process sees the same micro-batches even where it need not

    def __str__(self) -> str:
        ways = "; ".join(" ".join(f"{k}={v}" for k, v in way.fixed) for way in self.ways)
        return f"case {self.seed} on {self.size}: {self.samples} samples, {self.optimizer}, {ways}; {self.actions}"


def case_of(seed: int, size: int) -> Case:
    """Draw a case."""
    rng = random.Random(seed * 7919 + size)
    samples = rng.randint(6, 13)
    optimizer = rng.choice(OPTIMIZERS)
    ways = tuple(_way(rng, size, samples) for _ in range(2))
    least = max(way.data if ("shard", "parameters") in way.fixed else 1 for way in ways)  # fewer samples are refused
    actions = tuple(_action(rng, samples, least) for _ in range(rng.randint(3, 7)))
    return Case(seed, size, samples, optimizer, ways, (("step", 1, samples, None), *actions), rng.random() < 0.6)


def _way(rng: random.Random, size: int, samples: int) -> Way:
    data = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    pipeline = size // data
    fixed: dict[str, Any] = {"data": data, "pipeline": pipeline}
    chunks = 2 if pipeline > 1 and rng.random() < 0.4 else 1
    if pipeline > 1:
        fixed["schedule"] = "searched" if rng.random() < 0.1 else rng.choice(SEVERAL if chunks == 2 else ALONE)
        fixed["chunks"] = chunks
    count = rng.randint(1, min(7, samples // data))
    fixed["num_micro_batches"] = count
    if data > 1:
        shards = ["none", "none", "optimizer", "gradients", "parameters"]
        shard = rng.choice(shards[: 3 if chunks > 1 else 4 if pipeline > 1 else 5])
        fixed["shard"] = shard
        if shard != "none" and data == 4 and rng.random() < 0.5:
            fixed["shard_ranks"] = 2
    stages = pipeline * chunks
    places = tuple(sorted(rng.random() for _ in range(stages - 1))) if rng.random() < 0.75 else None
    bucket = rng.choice((None, None, 64, 400, 4096))
    return Way(tuple(fixed.items()), stages, places, bucket, rng.random() < 0.2)


def _action(rng: random.Random, samples: int, least: int) -> tuple[Any, ...]:
    """Draw one action: (what, how many batches add up, samples, time in place of the recipe's)."""
    name = rng.choice(("step", "step", "step", "step", "evaluate", "predict", "move", "eval_mode", "state", "freeze"))
    size = samples if rng.random() < 0.5 else rng.choice((samples - 1, samples - 3, samples + 2, samples // 2, 2, 1))
    time = rng.choice((None, None, None, 1, 2, 4))
    return name, 2 if rng.random() < 0.25 else 1, max(size, least), time
