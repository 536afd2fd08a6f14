"""Identity: who this process is among the processes of the job. The only reader of the environment."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.errors import HeadwayError
from headway.launch.directory import shown

RUN_DIRECTORY = "HEADWAY_RUN_DIRECTORY"
DEVICE_MEMORY = "HEADWAY_DEVICE_MEMORY"
DEADLINE = "HEADWAY_DEADLINE"
LAUNCHER = "HEADWAY_LAUNCHER"
PLAN_REQUEST = "HEADWAY_PLAN_REQUEST"
LISTENING_SOCKET = "HEADWAY_LISTENING_SOCKET"


@dataclass(frozen=True)
class PlanRequest:
    """What `headway plan` or `headway check` asks of the script's call of headway.plan."""

    cluster: str | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    save: Path | None = None
    check: bool = False  # record the program and plan nothing
    samples: int | None = None  # to record it for

    def to_json(self) -> str:
        """Write the request as the text of one environment variable."""
        save = None if self.save is None else str(self.save)
        return json.dumps({**vars(self), "fixed": dict(self.fixed), "save": save})

    @staticmethod
    def from_json(text: str) -> PlanRequest:
        """Read what `to_json` wrote."""
        raw = json.loads(text)
        save = None if raw["save"] is None else Path(raw["save"])
        fixed = {name: _frozen(value) for name, value in raw["fixed"].items()}
        return PlanRequest(raw["cluster"], fixed, save, raw["check"], raw["samples"])


@dataclass(frozen=True)
class Identity:
    """Who this process is: its rank, how many there are, where they meet, and who started them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str | None = None
    master_port: int | None = None
    launcher: str = "alone"  # "headway", "torchrun", "slurm", "kubernetes" or "alone"
    run_directory: Path | None = None
    device_memory: int | None = None  # bytes
    deadline: float | None = None  # seconds that a wait for another rank may take
    plan_only: PlanRequest | None = None


def identify(environ: Mapping[str, str] | None = None) -> Identity:
    """Read from the environment who this process is. Raises HeadwayError when its variables disagree."""
    environ = os.environ if environ is None else environ
    if PLAN_REQUEST in environ:
        return Identity(plan_only=PlanRequest.from_json(environ[PLAN_REQUEST]))
    if "RANK" in environ or LAUNCHER in environ:
        identity = _from_ranks(environ)
    elif "SLURM_PROCID" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        identity = _from_slurm(environ)
    else:
        identity = Identity()
    _check(identity)
    directory = environ.get(RUN_DIRECTORY)
    return replace(
        identity,
        run_directory=None if directory is None else Path(directory),
        device_memory=_number(environ, DEVICE_MEMORY) if DEVICE_MEMORY in environ else None,
        deadline=float(environ[DEADLINE]) if DEADLINE in environ else None,
    )


def listening_socket(environ: Mapping[str, str] | None = None) -> int | None:
    """Give the file descriptor of the socket on which rank 0 hosts the meeting point; None on other ranks."""
    environ = os.environ if environ is None else environ
    return _number(environ, LISTENING_SOCKET) if LISTENING_SOCKET in environ else None


def describe(identity: Identity, cluster_text: str) -> str:
    """Say in one line what was found (`cluster_text`), which launcher was recognised, and where the journal lies."""
    started = {"alone": "started by itself", "headway": "started by headway run"}.get(
        identity.launcher, f"started by {identity.launcher}"
    )
    limited = "" if identity.device_memory is None else " (a limit)"
    if identity.run_directory is not None:
        run = f"; {shown(identity.run_directory)}"
    else:
        run = "" if identity.launcher == "alone" else f"; no journal ({RUN_DIRECTORY}=runs/NAME keeps one)"
    return f"headway: {cluster_text}{limited}; {started}{run}"


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expand SLURM's compressed host list: "n[1-2,07],login" -> n1, n2, n07, login."""
    hosts: list[str] = []
    # Commas outside brackets part the entries; an entry is text and bracketed ranges in turn.
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip()):
        parts = re.findall(r"\[([^\]]*)\]|([^\[]+)", entry)
        choices = [[text] if text else _ranges(ranges, nodelist) for ranges, text in parts]
        hosts.extend("".join(choice) for choice in itertools.product(*choices))
    if not hosts:
        raise HeadwayError("the list of hosts is empty", place="SLURM_NODELIST", remedy="start with srun")
    return tuple(hosts)


def _ranges(text: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise HeadwayError(
                f"{part!r} is not a number or a range of numbers",
                place=f"SLURM_NODELIST={nodelist}",
                remedy="n[1-3,5] is the form that is understood; or set MASTER_ADDR and MASTER_PORT",
            )
        first, last = match[1], match[2] or match[1]
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def _from_ranks(environ: Mapping[str, str]) -> Identity:
    """Read RANK, WORLD_SIZE, ...: headway's own launcher, torchrun, and Kubernetes operators set these."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    launcher = environ.get(LAUNCHER)
    if launcher is None:
        kubernetes = "KUBERNETES_SERVICE_HOST" in environ and "TORCHELASTIC_RUN_ID" not in environ
        launcher = "kubernetes" if kubernetes else "torchrun"
    # An operator that starts one process per host (pod) gives no local numbers.
    one_each = launcher == "kubernetes"
    local_rank = _number(environ, "LOCAL_RANK", 0 if one_each or size == 1 else rank)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1 if one_each else size)
    if size > 1 and not ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        missing = "MASTER_ADDR" if "MASTER_ADDR" not in environ else "MASTER_PORT"
        raise _disagree(f"{size} processes, but {missing} does not say where they meet", missing)
    address = environ.get("MASTER_ADDR")
    port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    return Identity(rank, size, local_rank, local_size, address, port, launcher)


def _from_slurm(environ: Mapping[str, str]) -> Identity:
    """Read what srun sets. The ranks meet on the job's first host, on a port made from the job's number."""
    rank = _number(environ, "SLURM_PROCID")
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    local_rank = _number(environ, "SLURM_LOCALID")
    listed = next((name for name in _NODELISTS if environ.get(name)), None)
    if listed is None:
        raise _disagree(f"{size} tasks, but no list of hosts", "SLURM_NODELIST")
    hosts = expand_nodelist(environ[listed])
    address = environ.get("MASTER_ADDR", hosts[0])
    if "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT")
    else:
        # Below the ports that Linux hands out by itself (32768 and up), so that no client socket sits on it.
        job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0)
        port = 15000 + (job + 101 * step) % 15000
    return Identity(rank, size, local_rank, _tasks_here(environ, size, len(hosts)), address, port, "slurm")


_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


def _tasks_here(environ: Mapping[str, str], size: int, num_hosts: int) -> int:
    """Read how many tasks this host runs: "2(x3),1" lists them host by host; without it they are spread evenly."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return -(-size // num_hosts)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            raise _disagree(f"{text!r} does not say how many tasks each host runs", "SLURM_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(_number(environ, "SLURM_NODEID", 0), len(counts) - 1)]


def _check(identity: Identity) -> None:
    if identity.size < 1:
        raise _disagree(f"a job of {identity.size} processes", "WORLD_SIZE")
    if not 0 <= identity.rank < identity.size:
        raise _disagree(f"rank {identity.rank} in a job of {identity.size} processes", "RANK, WORLD_SIZE")
    if not 0 <= identity.local_rank < identity.local_size <= identity.size:
        raise _disagree(
            f"local rank {identity.local_rank} of {identity.local_size} on this host, in a job of {identity.size}",
            "LOCAL_RANK, LOCAL_WORLD_SIZE",
        )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise _disagree(f"{name} is missing beside the launcher's other variables", name)
        return default
    try:
        return int(text)
    except ValueError:
        raise _disagree(f"{name}={text!r} is not a whole number", name) from None


def _disagree(fact: str, place: str) -> HeadwayError:
    return HeadwayError(
        f"the environment does not say who this process is: {fact}",
        place=f"environment: {place}",
        remedy="start with `headway run -n N script.py`, torchrun or srun, or unset RANK and WORLD_SIZE",
    )


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
