"""Compares a training step of a plain model and a Reducer with torch's DDP, on gloo ranks, in interleaved rounds.

    python benchmarks/reduce_vs_ddp.py [--ranks 2] [--rounds 12] [--batch 4] [--layers 4] [--width 384]

The model is the GPT of examples/gpt.py with large layers, so that summing gradients is most of what differs. A ratio
below 1 says that the Reducer is faster.
"""

from __future__ import annotations

import argparse
from typing import Any

from rounds import alternate, example, load, on_ranks


def main() -> None:
    """Read the command line, run the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of each in a round")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and micro-batch")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--micros", type=int, default=1, help="micro-batches that accumulate before a step")
    parser.add_argument("--direct-bytes", type=int, default=None, help="from which size a gradient is its own bucket")
    parser.add_argument("--bucket-bytes", type=int, default=None, help="how large a bucket of several may grow")
    given = parser.parse_args()
    on_ranks(given.ranks, compare, vars(given))


def compare(world: Any, given: dict[str, Any]) -> None:
    """Train both on this rank; rank 0 prints how they compare."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from headway.collective.reduce import Reducer

    gpt = example("gpt")
    options = gpt.parse_options([f"--{name}={given[name]}" for name in ("layers", "width", "context")])
    mine, theirs = gpt.build_model(options), gpt.build_model(options)
    chosen = {name: given[name] for name in ("direct_bytes", "bucket_bytes") if given[name] is not None}
    reducer = Reducer(world, world.everyone, dict(mine.named_parameters()), **chosen)
    ddp = DistributedDataParallel(theirs)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (mine, theirs)]
    generator = torch.Generator().manual_seed(world.rank)
    shape = (given["micros"], 2, given["batch"], given["context"])
    data = [tuple(pair) for pair in torch.randint(0, 256, shape, generator=generator)]
    scale = 1.0 / (world.size * len(data))

    def ours() -> None:
        optimizers[0].zero_grad()
        reducer.begin(scale)
        for number, batch in enumerate(data):
            if number == len(data) - 1:
                reducer.arm()
            gpt.loss(mine, batch).backward()
        reducer.finish()
        optimizers[0].step()

    def torchs() -> None:
        optimizers[1].zero_grad()
        with ddp.no_sync():
            for batch in data[:-1]:
                (gpt.loss(ddp, batch) / len(data)).backward()
        (gpt.loss(ddp, data[-1]) / len(data)).backward()
        optimizers[1].step()

    ratio = alternate(world, ours, torchs, rounds=given["rounds"], steps=given["steps"])
    same = all(torch.allclose(p, q, atol=1e-4) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True))
    if world.rank == 0:
        size = sum(parameter.numel() for parameter in mine.parameters())
        print(
            f"GPT of {size / 1e6:.1f} M parameters, {world.size} gloo ranks, micro-batches: {len(data)}, {load()}; "
            f"{'same' if same else 'DIFFERENT'} parameters after it; Reducer, DDP:\n{ratio}"
        )


if __name__ == "__main__":
    main()
