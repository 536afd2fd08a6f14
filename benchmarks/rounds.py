"""Rounds: two ways of doing one thing, timed in turn by the same processes, so that a busy machine slows both alike.

Not a benchmark itself. `on_ranks` starts gloo ranks with one thread each; `alternate` times the ways; `Ratio` sums up.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

Step = Callable[[], Any]


@dataclass(frozen=True)
class Rank:
    """This process among the others, in the shape of launch.identity.Identity."""

    rank: int
    size: int
    local_rank: int
    run_directory: Path
    launcher: str = "headway"
    master_address: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of a step, one number a round: on the wall, and of the CPU (all threads of all ranks)."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """How ours compares with theirs: medians, and the median and quartiles of the ratios of single rounds."""

    ours: Times
    theirs: Times

    def line(self, which: str) -> str:
        """Write one line for "wall" or "cpu"."""
        a, b = getattr(self.ours, which), getattr(self.theirs, which)
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        name = "wall" if which == "wall" else "CPU of all ranks"
        return (
            f"{name:<17} {statistics.median(a) * 1e3:8.1f} ms  {statistics.median(b) * 1e3:8.1f} ms  "
            f"ratio {middle:.3f}  (quartiles {low:.3f} to {high:.3f}; fastest rounds {min(a) / min(b):.3f})"
        )

    def __str__(self) -> str:
        return f"  {self.line('wall')}\n  {self.line('cpu')}"


def example(name: str) -> Any:
    """Import examples/NAME.py."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def on_ranks(size: int, function: Callable[..., None], *args: Any, timeout: float = 600.0) -> None:
    """Call `function(world, *args)` on `size` new processes; exit when one fails or they take longer than `timeout`."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_be_rank, args=(rank, size, folder, function, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        if any(process.exitcode != 0 for process in processes):
            sys.exit(f"a rank failed or took over {timeout:g} s: exit codes {[p.exitcode for p in processes]}")


def _be_rank(rank: int, size: int, folder: str, function: Callable[..., None], args: Sequence[Any]) -> None:
    import torch

    from headway.collective.world import World

    torch.set_num_threads(1)
    world = World.start(Rank(rank, size, rank, Path(folder)), deadline=120.0)
    function(world, *args)
    world.barrier()
    world.close()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may end the process with an error while the interpreter goes


def alternate(world: Any, ours: Step, theirs: Step, *, rounds: int, steps: int = 1, warm: int = 2) -> Ratio:
    """Time both in turn on all ranks; who goes first changes from round to round."""
    import torch

    for _ in range(warm):
        ours()
        theirs()
    kept: tuple[list[tuple[float, float]], ...] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            step = (ours, theirs)[which]
            world.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            cpu = time.process_time() - cpu
            world.barrier()
            wall = time.perf_counter() - wall
            total = torch.tensor([cpu], dtype=torch.float64)
            world.all_reduce(total)
            kept[which].append((wall / steps, float(total) / steps))
    sides = [Times(tuple(w for w, _ in times), tuple(c for _, c in times)) for times in kept]
    return Ratio(sides[0], sides[1])


def load() -> str:
    """Say how busy the machine is: its cores, and the mean number of running processes over the last minute."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
