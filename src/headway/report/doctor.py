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
from headway.cost.cluster import Link
from headway.cost.model import all_reduce_seconds
from headway.launch.identity import identify
from headway.launch.machine import cores, memory_bytes
from headway.launch.start import Job, start
from headway.planner.wire import MENUS, NEARLY, PARTS
from headway.units import format_bytes, format_flop_rate, format_rate, format_seconds

# Run by each of the processes between which links are measured.
_SCRIPT = "import sys\nfrom headway.report.doctor import measure\nmeasure(sys.argv[1])\n"
_DEADLINE = 60.0


@dataclass(frozen=True)
class Measured:
    """What was measured between processes: link seconds and bytes/s, each process's float32 FLOP/s and bytes/s.

    `codecs` are the seconds that each works for a byte of gradients.
    """

    latency: float
    bandwidth: float
    flops: float
    memory_bandwidth: float
    codecs: Mapping[str, float]


def examine(num_processes: int = 2, model_bytes: int | None = None, rate: float | None = None) -> Iterator[str]:
    """Yield the lines of `headway doctor`, as they become known; the last ones after some seconds of measuring.

    With `model_bytes` of float32 parameters also what each codec would give for their gradients, over the link that was
    measured, or over one of `rate` bytes per second.
    """
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
        if model_bytes is not None:
            yield from codec_lines(measured, num_processes, model_bytes, rate)
    use = max(1, len(devices)) if devices else here
    what = "one process a device, nccl" if devices else "one process a core, gloo"
    yield f"use      headway run -n {use} train.py ({what})"


def codec_lines(measured: Measured, ranks: int, model_bytes: int, rate: float | None) -> Iterator[str]:
    """Yield what each codec would give: seconds on the wire, and of work, for one reduction that nothing hides."""
    link = Link(measured.latency, measured.bandwidth if rate is None else rate)
    which = "the link here" if rate is None else "the link that you named"
    yield (
        f"codecs   {format_bytes(model_bytes)} of float32 gradients, {ranks} ranks, {which} of "
        f"{format_rate(link.bandwidth)}: one reduction, with nothing to hide behind"
    )
    seconds = {}
    for name, part in PARTS.items():
        wire, work = all_reduce_seconds(model_bytes * part, ranks, link), measured.codecs.get(name, 0.0) * model_bytes
        seconds[name] = wire + work
        at = f" + {format_seconds(work)} of work, at {format_rate(model_bytes / work)}" if work else ""
        yield f"         {name:<5} {format_seconds(wire + work):>8}   {format_seconds(wire)} on the wire{at}"
    for asked, menu in MENUS.items():
        best = next(name for name in menu if seconds[name] <= (1 + NEARLY) * min(seconds[other] for other in menu))
        yield f'         "{asked}" would take {best}: the least lossy within {NEARLY:.0%} of the fastest it may take'


def measure(result: str) -> None:
    """Measure links and rates in one of several processes; rank 0 writes what was found to the file `result`."""
    from headway.collective.probe import measure_codecs, measure_link
    from headway.collective.world import World
    from headway.cost.measure import measure_rates

    world = World.start(identify(), deadline=_DEADLINE)
    latency, bandwidth = measure_link(world, tuple(range(world.size)))[:2]
    world.barrier()
    rates = measure_rates(concurrent=world.size)
    codecs = measure_codecs(world)
    if world.rank == 0:
        found = Measured(latency, bandwidth, rates.flops, rates.bandwidth, codecs)
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
