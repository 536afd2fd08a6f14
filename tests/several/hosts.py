"""Hosts on one machine: network namespaces joined by a bridge, each port of a shaped rate; root and iproute2 needed.

host 0           host 1            each a namespace of its own
10.77.0.1        10.77.0.2         eth0, rate-limited both ways
    |                |
    +---- switch ----+             a bridge, in a namespace too: this machine's own network is not touched
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "headway"
PORT = 29500  # every host's ports are its own
BURST = "256kb"  # sent at full speed after a pause: 2 ms at 1 Gbit/s, so that a busy machine does not lose its turn


@dataclass(frozen=True)
class Hosts:
    """Some hosts with their own addresses; what runs on them ends with the fixture."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    switch: str

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a command on a host."""
        full = ["ip", "netns", "exec", self.names[host], *command]
        given = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(environment or {})}
        return subprocess.Popen(full, env=given, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def run_ranks(
        self,
        script: Path,
        *args: str,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        per_host: int = 1,
    ) -> list[str]:
        """Run a Python script as `per_host` ranks on each host, as torchrun would; return what each printed.

        Raises RuntimeError with the output of a rank that failed, or of all when `timeout` seconds pass.
        """
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        started = []
        size = per_host * len(self.names)
        for rank in range(size):
            host, local = divmod(rank, per_host)
            who = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host}
            meet = {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": str(PORT), "PYTHONPATH": paths}
            everything = {**{name: str(number) for name, number in who.items()}, **meet, **(environment or {})}
            command = [sys.executable, str(script), *args]
            started.append(self.start(host, command, everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        end = time.monotonic() + timeout
        outputs = []
        try:
            for process in started:
                outputs.append(process.communicate(timeout=max(0.1, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            for process in started:
                process.kill()
            outputs += [process.communicate()[0] for process in started[len(outputs) :]]
            raise RuntimeError(f"no end within {timeout} s:\n" + "\n".join(outputs)) from None
        for rank, (process, output) in enumerate(zip(started, outputs, strict=True)):
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with exit code {process.returncode}:\n{output}")
        return outputs

    def shape(self, rate: str) -> None:
        """Limit what each host sends and receives to a rate, as `tc` writes it: "1gbit"."""
        for number, name in enumerate(self.names):
            for namespace, device in ((name, "eth0"), (self.switch, f"port{number}")):
                limit = ["tbf", "rate", rate, "burst", BURST, "latency", "50ms"]
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)


def missing() -> str | None:
    """Return why hosts cannot be made here; None when they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need iproute2 (ip, tc)"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "bridge0", "type", "bridge")
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", BURST,
             "latency", "50ms")  # fmt: skip
    except RuntimeError as error:
        return f"network namespaces are not allowed here ({error})"
    finally:
        _remove([name])
    return None


@contextmanager
def make_hosts(count: int, rate: str = "1gbit") -> Iterator[Hosts]:
    """Make hosts with links of a rate; on leaving, whatever happened, end what runs on them and remove them.

    What a killed process left behind is removed by the next one. Raises RuntimeError saying which command failed.
    """
    _remove(_orphans())
    names = tuple(f"{PREFIX}-{os.getpid()}-{number}" for number in range(count))
    switch = f"{PREFIX}-{os.getpid()}-switch"
    addresses = tuple(f"10.77.0.{number + 1}" for number in range(count))
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{number}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
        hosts = Hosts(names, addresses, switch)
        hosts.shape(rate)
        yield hosts
    finally:
        _remove([*names, switch])


def tell(world: Any, found: Mapping[str, Any]) -> NoReturn:
    """End this rank, the last thing that it does; rank 0's `found` is what `answer_of` returns."""
    world.barrier()
    if world.rank == 0:
        print(f"\n{json.dumps(found)}", flush=True)
    world.close()
    os._exit(0)  # without waiting for torch's threads


def answer_of(
    script: str, rate: str, *, timeout: float, per_host: int = 1, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a script on two new hosts, and return what its rank 0 tells; skip the test where there can be none."""
    import pytest

    why = missing()
    if why is not None:
        pytest.skip(why)
    with make_hosts(2, rate) as hosts:
        outputs = hosts.run_ranks(Path(script), environment=environment or {}, timeout=timeout, per_host=per_host)
    found: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def _existing() -> list[str]:
    folder = Path("/var/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _orphans() -> list[str]:
    """Return namespaces made here by a process that is no more."""
    found = []
    for name in _existing():
        parts = name.split("-")
        if len(parts) == 3 and parts[0] == PREFIX and parts[1].isdigit() and not Path(f"/proc/{parts[1]}").exists():
            found.append(name)
    return found


def _remove(names: Sequence[str]) -> None:
    """Remove namespaces, and before that end what runs in them; their devices go with them."""
    there = set(_existing())
    for name in names:
        if name not in there:
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for process in inside.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"`{' '.join(command)}`: {result.stderr.strip() or result.stdout.strip()}")
