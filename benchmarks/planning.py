"""How long it takes to plan for a large cluster: CPU seconds for GPTs on meta and devices that are not here.

`python benchmarks/planning.py`; takes a minute on one core, or name one case by layers, cluster, width and samples of a
step: `python benchmarks/planning.py 96 32x8xH100 4096 1024` takes several minutes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import headway

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import GPT

CASES = (
    (24, "2x8xH100", 512, 64),
    (96, "4x8xH100", 1024, 128),
    (96, "8x8xH100", 1024, 256),
    (96, "32x8xH100", 1024, 1024),
    (96, "4x8xH100", 4096, 128),
)
CONTEXT = 1024


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of the next byte."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def main() -> None:
    """Print one line for each case."""
    given = sys.argv[1:]
    cases = ((int(given[0]), given[1], int(given[2]), int(given[3])),) if given else CASES
    torch.set_num_threads(1)
    print("| layers, width | cluster | samples | CPU s | plan |\n| --- | --- | --- | --- | --- |")
    for layers, cluster, width, samples in cases:
        with torch.device("meta"):
            model = GPT(layers, width, width // 64, CONTEXT)
        tokens = torch.zeros(2, samples, CONTEXT, dtype=torch.int64)
        begin = time.process_time()
        plan = headway.plan(model, loss, (tokens[0], tokens[1]), cluster=cluster)
        spent = time.process_time() - begin
        chosen = str(plan).splitlines()[0].removeprefix("plan").strip()
        print(f"| {layers}, {width} | {cluster} | {samples} | {spent:.1f} | {chosen} |", flush=True)


if __name__ == "__main__":
    main()
