"""A device of any size, on a CPU: what this process may allocate from now on, enforced by the kernel.

`RLIMIT_DATA` bounds private writable memory, so an allocation beyond the budget fails inside torch's allocator, and
raises the RuntimeError that a full accelerator would raise. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import resource
import sys
from pathlib import Path

from headway.errors import HeadwayError
from headway.launch.identity import Identity

# Stacks and buffers of the groups that a job makes beside the first one: not the script's.
_GROUPS_BYTES = 24 * 2**20


def limit_memory(budget_bytes: int, identity: Identity) -> None:
    """Let this process allocate `budget_bytes` beyond what torch, Headway and the connections already hold.

    On an accelerator the budget bounds torch's own pool instead. Call it before the script runs.
    """
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda", identity.local_rank)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)
        return
    if sys.platform != "linux":
        raise HeadwayError(
            "a memory limit needs Linux", place="--device-memory", remedy="leave --device-memory away here"
        )
    # Stacks of threads that start from now on are as small as the launcher made them; this one may grow again.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    ample = 8 * 2**20
    resource.setrlimit(resource.RLIMIT_STACK, (ample if hard == resource.RLIM_INFINITY else min(ample, hard), hard))
    _warm_up()
    _connect(identity)
    allowance = _GROUPS_BYTES if identity.size > 1 else 0
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes() + allowance + budget_bytes, hard))


def lift_limit() -> None:
    """Take the limit away again: writing down why a script failed must not fail for want of memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def held_bytes() -> int:
    """Give the bytes that count against RLIMIT_DATA now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise HeadwayError("the kernel does not say how much this process holds", place="/proc/self/status: VmData")


def _warm_up() -> None:
    """Let libraries take now what they take once: the budget is for the training.

    An optimizer's first step alone imports torch's compiler, about 70 MiB.
    """
    import torch

    import headway

    for name in headway.__all__:
        with contextlib.suppress(ImportError):  # what is missing is for a script that wants it to meet
            getattr(headway, name)
    layer = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 6 * 6, 2))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 2, 8, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()


def _connect(identity: Identity) -> None:
    """Join the other ranks now, so that the threads and buffers of the connections do not count.

    headway.collective takes an initialised default group as it is.
    """
    if identity.size == 1:
        return
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{identity.master_address}:{identity.master_port}",
        rank=identity.rank,
        world_size=identity.size,
        timeout=datetime.timedelta(seconds=identity.deadline or 300.0),
    )
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    dist.all_reduce(torch.zeros(1))
