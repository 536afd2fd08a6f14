"""Compares a training step of a plain model and a Reducer with torch's DDP, on gloo ranks, in interleaved rounds.

    python benchmarks/reduce_vs_ddp.py [--ranks 2] [--rounds 12] [--batch 4] [--layers 4] [--width 384]

Prints the median seconds of each, and the median over rounds of their ratio (below 1: the Reducer is faster).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


@dataclass(frozen=True)
class Settings:
    """What to compare on."""

    ranks: int
    rounds: int
    steps: int
    batch: int
    length: int
    layers: int
    width: int
    direct_bytes: int | None
    bucket_bytes: int | None
    micros: int


@dataclass(frozen=True)
class Rank:
    """This process among the others, in the shape of launch.identity.Identity."""

    rank: int
    size: int
    run_directory: Path
    local_rank: int
    launcher: str = "headway"
    master_address: str | None = None
    master_port: int | None = None


def main() -> None:
    """Start the ranks, wait for them, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of each in a round")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--micros", type=int, default=1, help="micro-batches that accumulate before a step")
    parser.add_argument("--direct-bytes", type=int, default=None, help="from which size a gradient is its own bucket")
    parser.add_argument("--bucket-bytes", type=int, default=None, help="how large a bucket of several may grow")
    settings = Settings(**vars(parser.parse_args()))
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run, args=(settings, rank, folder), daemon=True) for rank in range(settings.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
        failed = [process for process in processes if process.exitcode != 0]
        for process in failed:
            process.kill()
    sys.exit(1 if failed else 0)


def gpt(settings: Settings) -> Any:
    """Return a byte-level GPT with tied embeddings."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.before_mlp(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(256, settings.width)
            self.positions = nn.Embedding(settings.length, settings.width)
            self.blocks = nn.Sequential(*(Block(settings.width) for _ in range(settings.layers)))
            self.norm = nn.LayerNorm(settings.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.tokens(x) + self.positions.weight[: x.shape[1]]
            logits = self.norm(self.blocks(h)) @ self.tokens.weight.T
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    torch.manual_seed(0)
    return GPT()


def run(settings: Settings, rank: int, folder: str) -> None:
    """Be one rank: train both for some rounds, and on rank 0 print the comparison."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from headway.collective.reduce import Reducer
    from headway.collective.world import World

    torch.set_num_threads(1)
    world = World.start(Rank(rank, settings.ranks, Path(folder), rank), deadline=120.0)
    mine, theirs = gpt(settings), gpt(settings)
    size = sum(parameter.numel() for parameter in mine.parameters())
    chosen = {"direct_bytes": settings.direct_bytes, "bucket_bytes": settings.bucket_bytes}
    extra = {name: value for name, value in chosen.items() if value is not None}
    reducer = Reducer(world, world.everyone, dict(mine.named_parameters()), **extra)
    ddp = DistributedDataParallel(theirs)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (mine, theirs)]
    torch.manual_seed(rank)
    data = [torch.randint(0, 256, (settings.batch, settings.length)) for _ in range(settings.micros)]
    scale = 1.0 / (world.size * settings.micros)

    def headway_step() -> None:
        optimizers[0].zero_grad()
        reducer.begin(scale)
        for number, batch in enumerate(data):
            if number == len(data) - 1:
                reducer.arm()
            mine(batch).backward()
        reducer.finish()
        optimizers[0].step()

    def ddp_step() -> None:
        optimizers[1].zero_grad()
        with ddp.no_sync():
            for batch in data[:-1]:
                (ddp(batch) / settings.micros).backward()
        (ddp(data[-1]) / settings.micros).backward()
        optimizers[1].step()

    def seconds(step: Any) -> tuple[float, float]:
        """Return wall and CPU seconds of a step (all threads of this rank)."""
        world.barrier()
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(settings.steps):
            step()
        cpu = time.process_time() - cpu
        world.barrier()
        return (time.perf_counter() - started) / settings.steps, cpu / settings.steps

    for step in (headway_step, ddp_step) * 2:
        seconds(step)
    ours: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for number in range(settings.rounds):
        # Alternate who goes first, so that neither profits from the other's warm caches.
        pair = [(headway_step, ours), (ddp_step, others)]
        for step, times in pair if number % 2 else reversed(pair):
            times.append(seconds(step))
    same = all(torch.allclose(p, q, atol=1e-4) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True))
    if rank == 0:
        print(
            f"GPT of {size / 1e6:.1f} M parameters, {settings.ranks} gloo ranks, micro-batches: {settings.micros}, "
            f"{settings.rounds} rounds of {settings.steps} steps; {'same' if same else 'DIFFERENT'} parameters after it"
        )
        for name, which in (("wall", 0), ("CPU of rank 0", 1)):
            mine_ms, theirs_ms = ([times[which] * 1e3 for times in side] for side in (ours, others))
            ratios = [a / b for a, b in zip(mine_ms, theirs_ms, strict=True)]
            print(
                f"{name}: Reducer {statistics.median(mine_ms):.1f} ms, DDP {statistics.median(theirs_ms):.1f} ms, "
                f"ratio {statistics.median(ratios):.3f} (quartiles {quartiles(ratios)})"
            )
    world.barrier()
    world.close()


def quartiles(values: list[float]) -> str:
    """Write the lower and upper quartile."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
