"""The cache of measured seconds: a JSON file that several processes may read and write at once."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path

FORMAT = 1

Table = dict[str, tuple[float, float]]
"""Seconds of forward and backward by what was timed."""


def cpu_name() -> str:
    """Return the processor's model name, as the system gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_key(torch_version: str, device: str, threads: int, concurrent: int) -> str:
    """Name what measured seconds depend on beside the call itself."""
    return f"{cpu_name()} | {device} | torch {torch_version} | {threads} threads | {concurrent} at once"


def load_table(path: Path | None, machine: str) -> Table:
    """Read what is known about a machine; nothing when the file is missing or damaged."""
    return dict(_read(path).get(machine, {}))


def save_table(path: Path | None, machine: str, fresh: Table) -> None:
    """Add measured seconds to the file. The file is replaced as a whole, so a reader never sees half of one.

    When two processes write at once the later one wins, and what the other measured is measured again one day.
    A file that cannot be written is left alone: the cache only saves time.
    """
    if path is None:
        return
    machines = _read(path)
    machines.setdefault(machine, {}).update(fresh)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"format": FORMAT, "machines": machines}, file)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise


def digest(name: str) -> str:
    """Shorten what was timed to sixteen hexadecimal digits."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _read(path: Path | None) -> dict[str, Table]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return {}
        return {
            machine: {name: (float(forward), float(backward)) for name, (forward, backward) in entries.items()}
            for machine, entries in content["machines"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
