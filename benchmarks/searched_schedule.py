"""The searched schedule beside the built ones: seconds of the step, gap to the bound, seconds of the search.

`python benchmarks/searched_schedule.py`; takes some minutes, needs no device.
"""

from __future__ import annotations

import random
import time

from headway.schedule.catalogue import CATALOGUE
from headway.schedule.costs import Costs
from headway.schedule.searched import searched
from headway.schedule.simulate import simulate

SIZES = ((4, 16), (8, 32), (16, 64))


def drawn(chance: random.Random, num_stages: int, spread: float, message: float) -> Costs:
    """Draw stages of about 1 s for each of F, I and W, `spread` apart, and messages of so many seconds."""
    rows = [tuple(chance.uniform(1 - spread, 1 + spread) for _ in range(num_stages)) for _ in range(3)]
    return Costs(
        rows[0],
        tuple(a + b for a, b in zip(rows[1], rows[2], strict=True)),
        input=rows[1],
        weight=rows[2],
        message={(stage, stage + 1): message for stage in range(num_stages - 1)},
        activation_bytes=(1,) * num_stages,
    )


def main() -> None:
    """Print one line for each machine, kind of costs, and memory."""
    print("| ranks x micro-batches, stages a rank | costs | memory, of 1F1B's | best built | searched | gap | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_ranks, num_micro in SIZES:
        for chunks in (1, 2):
            num_stages = num_ranks * chunks
            placement = tuple(
                min(stage, num_stages - 1 - stage) if chunks == 2 else stage for stage in range(num_stages)
            )
            for text, spread, message in (("equal", 0, 0), ("uneven", 0.2, 0), ("uneven, slow links", 0.2, 0.3)):
                costs = drawn(random.Random(num_stages), num_stages, spread, message)
                for share in (1, 2):
                    limits = [share * num_stages] * num_ranks
                    built = []
                    for name, entry in CATALOGUE.items():
                        if entry.allows(chunks):
                            schedule = entry.build(num_stages, num_micro, chunks)
                            timeline = simulate(schedule, costs)
                            fits = all(timeline.peak_bytes(rank) <= limits[rank] for rank in range(num_ranks))
                            if schedule.placement == placement and fits:
                                built.append((timeline.makespan, name))
                    begin = time.process_time()
                    found = searched(costs, placement, num_micro, limits=limits)
                    spent = time.process_time() - begin
                    best = "{1} {0:.1f}".format(*min(built)) if built else "none fits"
                    print(
                        f"| {num_ranks} x {num_micro}, {chunks} | {text} | {share} | {best} | {found.makespan:.1f} "
                        f"| {found.gap:.2%} | {spent:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
