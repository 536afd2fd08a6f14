"""This machine as the launcher sees it: cores and memory that this process may use, without torch."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """Count the cores that this process may run on: its affinity, and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _first_line(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0] != "max":
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory_bytes() -> int:
    """Give the bytes of memory that this process and its children may use: the machine's, or the control group's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _first_line(Path(name)).strip()
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def kills_for_memory() -> int | None:
    """Count the processes that the kernel has killed for want of memory since boot; None where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith("oom_kill ")]
    return int(found[0]) if found else None


def _first_line(path: Path) -> str:
    try:
        with path.open() as file:
            return file.readline()
    except OSError:
        return ""
