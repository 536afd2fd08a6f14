"""This machine, measured: versions, cores, memory, links between processes, and what Headway would use."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import headway
from headway.launch.identity import identify
from headway.launch.machine import cores, memory_bytes
from headway.launch.start import Job, start
from headway.units import format_bytes, format_flop_rate, format_rate, format_seconds

# Run by each of the processes between which links are measured.
_SCRIPT = "import sys\nfrom headway.report.doctor import measure\nmeasure(sys.argv[1])\n"
_DEADLINE = 60.0


@dataclass(frozen=True)
class Measured:
    """What was measured between processes: link seconds and bytes/s, each process's float32 FLOP/s and bytes/s."""

    latency: float
    bandwidth: float
    flops: float
    memory_bandwidth: float


def examine(num_processes: int = 2) -> Iterator[str]:
    """Yield the lines of `headway doctor`, as they become known; the last ones after some seconds of measuring."""
    yield f"headway  {headway.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"packages {', '.join(f'{name} {found}' for name, found in _versions().items())}"
    here = cores()
    yield f"machine  {_processor()}, {here} core{'s' if here > 1 else ''}, {format_bytes(memory_bytes())} of memory"
    devices = _accelerators()
    yield f"devices  {', '.join(devices) if devices else 'no accelerator: the CPU computes'}"
    identity = identify()
    recognised = {"alone": "none (headway run, torchrun, SLURM and Kubernetes are recognised)"}
    yield f"launcher {recognised.get(identity.launcher, identity.launcher)}"
    measured = _measure_between(num_processes)
    if measured is None:
        yield "links    not measured: the processes could not talk, see above"
    else:
        yield (
            f"links    {format_seconds(measured.latency)} and {format_rate(measured.bandwidth)} "
            f"between {num_processes} processes here"
        )
        yield (
            f"compute  {format_flop_rate(measured.flops)} of float32 matrix product and "
            f"{format_rate(measured.memory_bandwidth)} of memory in each of {num_processes} processes at once"
        )
    use = max(1, len(devices)) if devices else here
    what = "one process a device, nccl" if devices else "one process a core, gloo"
    yield f"use      headway run -n {use} train.py ({what})"


def measure(result: str) -> None:
    """Measure links and rates in one of several processes; rank 0 writes what was found to the file `result`."""
    from headway.collective.probe import measure_link
    from headway.collective.world import World
    from headway.cost.measure import measure_rates

    world = World.start(identify(), deadline=_DEADLINE)
    latency, bandwidth = measure_link(world, tuple(range(world.size)))[:2]
    world.barrier()
    rates = measure_rates(concurrent=world.size)
    if world.rank == 0:
        found = Measured(latency, bandwidth, rates.flops, rates.bandwidth)
        Path(result).write_text(json.dumps(asdict(found)))
    world.barrier()
    world.close()


def _measure_between(num_processes: int) -> Measured | None:
    with tempfile.TemporaryDirectory(prefix="headway-doctor-") as folder:
        script, result = Path(folder) / "measure.py", Path(folder) / "measured.json"
        script.write_text(_SCRIPT)
        job = Job(script, (str(result),), num_processes, runs=Path(folder) / "runs", deadline=_DEADLINE)
        if start(job, stream=sys.stderr) != 0:
            return None
        return Measured(**json.loads(result.read_text()))


def _versions() -> Mapping[str, str]:
    found = {}
    for name in ("torch", "numpy", "rich", "click", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{each.name} ({format_bytes(each.total_memory)})" for each in properties]
