"""How long the simulator and the checker take: CPU seconds for up to a million actions.

`python benchmarks/simulator.py`; takes half a minute, needs no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.schedule.action import Schedule, chain
from headway.schedule.build import one_f_one_b
from headway.schedule.check import check
from headway.schedule.costs import Costs
from headway.schedule.lower import lower
from headway.schedule.simulate import simulate


def spent(work: Callable[[], object]) -> float:
    """Give the CPU seconds of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    """Print one line for each size: building, checking, times alone, times and memory, the same with messages."""
    print("| ranks x micro-batches | actions | built | checked | simulated | with memory | with messages too |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks, micros in ((64, 128), (256, 256), (1024, 512)):
        plain = Costs((1.0,) * ranks, (2.0,) * ranks)
        edges = chain(ranks)
        full = Costs(
            (1.0,) * ranks,
            (2.0,) * ranks,
            message=dict.fromkeys(edges, 0.1),
            static_bytes=(100,) * ranks,
            activation_bytes=(10,) * ranks,
            boundary_bytes=dict.fromkeys(edges, 1),
            temporary_bytes=(5,) * ranks,
            gap=0.01,
        )
        kept: list[Schedule] = []
        cells = [spent(lambda: kept.append(one_f_one_b(ranks, micros)))]  # noqa: B023
        schedule = kept[0]
        cells.append(spent(lambda: check(schedule)))  # noqa: B023
        cells += [spent(lambda: simulate(schedule, costs)) for costs in (plain, full)]  # noqa: B023
        lowered = lower(schedule, edges)
        cells.append(spent(lambda: simulate(lowered, full)))  # noqa: B023
        row = " | ".join(f"{seconds:.2f}" for seconds in cells)
        print(f"| {ranks} x {micros} | {2 * ranks * micros:,} | {row} |", flush=True)


if __name__ == "__main__":
    main()
