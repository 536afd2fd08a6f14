"""Runs a function on several real processes that talk over gloo, with a hard deadline and the first failure shown."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

SOON = 10.0
"""Seconds in which all ranks end when one has: 5 as promised, and as many for a busy machine. Deadlines are longer."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class TestIdentity:
    """The identity of a test process, in the shape of launch.identity.Identity."""

    __test__ = False  # pytest: not a test class
    rank: int
    size: int
    run_directory: Path
    launcher: str = "headway"
    local_rank: int = 0
    local_size: int = 1
    master_address: str | None = None
    master_port: int | None = None
    device_memory: int | None = None
    plan_only: None = None


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its exit code, what it returned, its error (with traceback text) and what it printed."""

    code: int | None
    value: Any
    error: BaseException | None
    trace: str
    output: str
    seconds: float


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, deadline: float = 30.0
) -> list:
    """Return what `function(world, *args)` returns on each of `size` ranks; fail with the first failing rank's error.

    `function` is defined at the top of a test module. `deadline` is the World's, `timeout` the whole run's (seconds).
    """
    outcomes = outcomes_on_ranks(size, function, *args, timeout=timeout, deadline=deadline)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.code != 0]
    if failed:
        # A rank that lost its peer is not the story; the one that failed by itself is.
        failed.sort(key=lambda rank: (getattr(outcomes[rank].error, "consequence", False), outcomes[rank].seconds))
        lines = [f"rank {failed[0]} of {size} failed first (exit code {outcomes[failed[0]].code}):"]
        lines += [outcomes[failed[0]].trace or outcomes[failed[0]].output or f"no answer within {timeout} s"]
        lines += [f"rank {rank}: {outcomes[rank].error!r}, exit code {outcomes[rank].code}" for rank in failed[1:]]
        pytest.fail("\n".join(lines), pytrace=False)
    return [outcome.value for outcome in outcomes]


def outcomes_on_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, deadline: float = 30.0
) -> list[Outcome]:
    """Run `function(world, *args)` on `size` ranks and return how each ended; no process outlives this call."""
    path = str(sys.modules[function.__module__].__file__)
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as name:
        folder = Path(name)
        context = _server()
        started = time.monotonic()
        processes = []
        try:
            for rank in range(size):
                task = (path, function.__module__, function.__qualname__, args, size, deadline)
                processes.append(context.Process(target=_main, args=(name, rank, pickle.dumps(task)), daemon=True))
                processes[-1].start()
            ends = _wait(processes, started, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [_outcome(folder, rank, process, ends[rank]) for rank, process in enumerate(processes)]


def _server() -> Any:
    """Return the context of a process that has imported torch once and forks each rank from there (seconds saved)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    return context


def _wait(processes: list[Any], started: float, timeout: float) -> list[float]:
    """Return after how many seconds each process ended; stop waiting at `timeout`."""
    ends = [timeout] * len(processes)
    left = set(range(len(processes)))
    while left and time.monotonic() - started < timeout:
        for rank in list(left):
            if not processes[rank].is_alive():
                ends[rank] = time.monotonic() - started
                left.discard(rank)
        time.sleep(0.01)
    return ends


def _outcome(folder: Path, rank: int, process: Any, seconds: float) -> Outcome:
    result = folder / f"result{rank}"
    value, error, trace = pickle.loads(result.read_bytes()) if result.exists() else (None, None, "")
    printed = folder / f"output{rank}"
    output = printed.read_text(errors="replace") if printed.exists() else ""
    return Outcome(process.exitcode, value, error, trace, output, seconds)


def _save(folder: Path, rank: int, value: Any, error: BaseException | None, trace: str) -> None:
    try:
        data = pickle.dumps((value, error, trace))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps((None, RuntimeError(repr(error)) if error is not None else None, trace or repr(value)))
    (folder / f"result{rank}.part").write_bytes(data)
    os.replace(folder / f"result{rank}.part", folder / f"result{rank}")


def _main(name: str, rank: int, data: bytes) -> None:
    """Be one rank: load the test module, join the others, call the function, write the result."""
    folder = Path(name)
    output = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        import torch

        from headway.collective.world import World

        torch.set_num_threads(1)
        path, module_name, function_name, args, size, deadline = pickle.loads(data)
        function = getattr(_load(path, module_name), function_name)
        identity = TestIdentity(rank, size, folder, local_rank=rank, local_size=size)
        world = World.start(identity, deadline=deadline)
        value = function(world, *args)
        world.barrier()
        world.close()
        _save(folder, rank, value, None, "")
        code = 0
    except BaseException as error:
        _save(folder, rank, None, error, traceback.format_exc())
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # never wait for torch's threads: they may wait for a rank that is gone


def _load(path: str, name: str) -> Any:
    """Import the test module as pytest did, or from its file."""
    if name == "__main__":
        name = "ranks_target"
    elif name in sys.modules:
        return sys.modules[name]
    else:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
