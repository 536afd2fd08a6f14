"""The processes of one job: started in groups of their own, watched, and ended, whole groups at a time."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headway.launch import identity as names
from headway.launch.cause import Ending

# With a memory limit every thread's stack counts against it, whether used or not; the usual 8 MiB would be dear.
_LIMITED_STACK = 2 * 2**20
# Freed tensors go back to the machine at once, as they go back to the pool on an accelerator.
_MALLOC = (("MALLOC_MMAP_THRESHOLD_", "262144"), ("MALLOC_TRIM_THRESHOLD_", "1048576"), ("MALLOC_ARENA_MAX", "1"))


class Children:
    """The ranks of a job on this machine, as child processes of the launcher."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._endings: dict[int, Ending] = {}

    def start(self, command: Sequence[str], environs: Sequence[Mapping[str, str]], run_directory: Path) -> None:
        """Start one process for each of `environs`: rank 0 on this terminal, the others into rankN.log.

        The port where they meet is reserved here and its socket handed to rank 0, so that nobody else can take it.
        """
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
            port = str(listening.getsockname()[1])
            for rank, environ in enumerate(environs):
                told = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                output = None if rank == 0 else (run_directory / f"rank{rank}.log").open("ab")
                passed = []
                if rank == 0:
                    told[names.LISTENING_SOCKET] = str(listening.fileno())
                    passed = [listening.fileno()]
                with contextlib.ExitStack() as stack:
                    if output is not None:
                        stack.enter_context(output)
                    if names.DEVICE_MEMORY in environ:
                        stack.enter_context(_small_stacks())
                    process = subprocess.Popen(
                        command,
                        env=told,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        process_group=0,
                        pass_fds=passed,
                    )
                self._processes.append(process)

    def poll(self) -> list[Ending]:
        """Look once at all that still run; return the endings so far, by rank."""
        for rank, process in enumerate(self._processes):
            if rank not in self._endings:
                # Look without reaping: until it is reaped its number, and so its group's, cannot become another's.
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._endings[rank] = Ending(rank, time.time(), self._reap(process))
        return [self._endings[rank] for rank in sorted(self._endings)]

    @property
    def running(self) -> bool:
        """Tell whether any rank still runs."""
        return len(self._endings) < len(self._processes)

    def interrupt(self) -> None:
        """Pass Ctrl-C on: the script may save what it has."""
        for rank, process in enumerate(self._processes):
            if rank not in self._endings:
                process.send_signal(signal.SIGINT)

    def end(self, *, patience: float = 4.0) -> list[Ending]:
        """End all that still run: SIGTERM to their groups, SIGKILL after `patience` seconds. Return the endings."""
        self._signal_groups(signal.SIGTERM)
        limit = time.monotonic() + patience
        while self.running and time.monotonic() < limit:
            self._poll_ended()
            time.sleep(0.02)
        self._signal_groups(signal.SIGKILL)
        while self.running:  # SIGKILL is not refused
            self._poll_ended()
            time.sleep(0.02)
        return self.poll()

    def _poll_ended(self) -> None:
        before = set(self._endings)
        self.poll()
        for rank in self._endings.keys() - before:
            self._endings[rank] = replace(self._endings[rank], ended=True)

    def _signal_groups(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._endings:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Collect one that is dead. What it started itself (loaders of data) is ended with it when it ended badly."""
        seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if seen is not None and not (seen.si_code == os.CLD_EXITED and seen.si_status == 0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def environ_of(
    rank: int,
    size: int,
    cores_each: int,
    run_directory: Path,
    device_memory: int | None,
    deadline: float | None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Give the environment of one rank: what `identity.identify` reads, and what its libraries need."""
    inherited = os.environ if inherited is None else inherited
    # A launcher around this one (torchrun, a scheduler) has told about its own ranks: not these.
    environ = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    environ |= {
        names.LAUNCHER: "headway",
        names.RUN_DIRECTORY: str(run_directory),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
    }
    environ.setdefault("OMP_NUM_THREADS", str(cores_each))
    if sys.platform == "linux":
        # All ranks are here; a host name that does not resolve must not matter.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device_memory is not None:
        environ[names.DEVICE_MEMORY] = str(device_memory)
        for name, value in _MALLOC:
            environ.setdefault(name, value)
    if deadline is not None:
        environ[names.DEADLINE] = str(deadline)
    return environ


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    """Let a process that starts now have small stacks for its threads; the limit is inherited, then put back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_LIMITED_STACK, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
