"""Measures calls on this machine: replays each distinct call of a graph alone, and remembers its seconds."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.cost.cache import Table, digest, load_table, machine_key, save_table
from headway.cost.cluster import Device
from headway.cost.model import Times, call_seconds, has_backward
from headway.graph.model import Call, ModelGraph, Ref, Weight

BUDGET = 2.0
"""Seconds that measuring one graph may take; the dearest calls come first, what is left is estimated."""

LEAST_REPEATS, MOST_REPEATS, REPEAT_SECONDS = 3, 9, 0.02

CHILLED_BYTES, EVICTED_BYTES, CHILLED_REPEATS = 1 << 18, 16 << 20, 5
"""Calls that move this much are timed with their weights out of the cache: as many bytes are written before each."""


@dataclass(frozen=True)
class Rates:
    """What this machine does: `flops` in float32 FLOP/s, `bandwidth` in bytes/s, `gap` seconds of the smallest call."""

    flops: float
    bandwidth: float
    gap: float

    def device(self, memory_bytes: int = 0, kind: str = "cpu") -> Device:
        """Return the rates as a device whose peaks are what was reached."""
        return Device(kind, memory_bytes, self.flops, self.flops, self.bandwidth, gap=self.gap, source="measured here")


def measure_rates(
    device: str = "cpu", threads: int | None = None, cache_path: Path | None = None, *, concurrent: int = 1
) -> Rates:
    """Measure matrix products (768 x 768), adding of 16 MiB tensors, and a call on one element: about 0.1 s.

    `concurrent` says how many processes measure at once on this machine; it is part of what the cache remembers by.
    """
    with _quiet(device, threads) as threads_now:
        key = machine_key(torch.__version__, device, threads_now, concurrent)
        table = load_table(cache_path, key)
        names = ("rate:flops", "rate:bandwidth", "rate:gap")
        if not all(name in table for name in names):
            side, long = 768, 4 << 20
            a, b = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
            x, y, z = (torch.zeros(long, device=device) for _ in range(3))
            one = torch.ones(1, device=device, requires_grad=True)
            product = _seconds(lambda: torch.mm(a, b), device)
            adding = _seconds(lambda: torch.add(x, y, out=z), device)
            values = (2 * side**3 / product, 3 * 4 * long / adding, _seconds(lambda: one + 1, device))
            table = {name: (value, 0.0) for name, value in zip(names, values, strict=True)}
            save_table(cache_path, key, table)
        return Rates(*(table[name][0] for name in names))


def measure_calls(
    graph: ModelGraph,
    device: str = "cpu",
    threads: int | None = None,
    cache_path: Path | None = None,
    *,
    concurrent: int = 1,
    budget: float = BUDGET,
) -> Times:
    """Time forward and backward of every distinct call of a graph, alone, on random inputs of the recorded shapes.

    `threads` are torch's threads, by default as they are. Calls are remembered in `cache_path` (JSON), by machine,
    torch version, threads, `concurrent` processes and the call's function, shapes and arguments. Takes about `budget`
    seconds at most and the memory of one call. Calls that cannot be replayed, or are left when time is out, are
    estimated from measured rates, scaled by how far the timed calls are from their estimates. Random generators are as
    before afterwards.
    """
    rates = measure_rates(device, threads, cache_path, concurrent=concurrent).device(kind=device)
    guesses = [call_seconds(graph, call, rates) for call in graph.calls]
    signatures = [_signature(graph, call) for call in graph.calls]
    first = {signature: call for signature, call in zip(reversed(signatures), reversed(graph.calls), strict=True)}
    with _quiet(device, threads) as threads_now:
        key = machine_key(torch.__version__, device, threads_now, concurrent)
        known = load_table(cache_path, key)
        fresh: Table = {}
        end = time.perf_counter() + budget
        for signature, call in sorted(first.items(), key=lambda item: -sum(guesses[item[1].index])):
            if signature in known or call.arguments is None:
                continue
            if time.perf_counter() > end:
                break
            seconds = _replay(graph, call, device)
            if seconds is not None:
                fresh[signature] = seconds
    if fresh:
        save_table(cache_path, key, fresh)
    return _assemble(graph, signatures, known | fresh, guesses, rates)


def _assemble(
    graph: ModelGraph, signatures: list[str], table: Table, guesses: list[tuple[float, float]], rates: Device
) -> Times:
    timed = [index for index, signature in enumerate(signatures) if signature in table]
    guessed = sum(sum(guesses[index]) for index in timed)
    scale = sum(sum(table[signatures[index]]) for index in timed) / guessed if guessed else 1.0
    pairs = [
        table.get(signature, (scale * guess[0], scale * guess[1]))
        for signature, guess in zip(signatures, guesses, strict=True)
    ]
    forward, backward = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    missing = sum(sum(pair) for pair, sig in zip(pairs, signatures, strict=True) if sig not in table)
    total = sum(forward) + sum(backward)
    for index, seconds in _adding_up(graph, rates):
        backward[index] += seconds
    return Times(tuple(forward), tuple(backward), missing / total if total else 0.0, "measured here")


def _adding_up(graph: ModelGraph, rates: Device) -> Iterator[tuple[int, float]]:
    """Yield (call, seconds) for the gradients of a value that several calls use: each but the last is added up."""
    users: dict[int, list[int]] = {}
    for call in graph.calls:
        for value in call.inputs:
            if graph.values[value].requires_grad:
                users.setdefault(value, []).append(call.index)
    for value, calls in users.items():
        for index in calls[:-1]:
            yield index, 3 * graph.values[value].bytes / rates.bandwidth


def resolve(path: str) -> Callable[..., Any] | None:
    """Find a function by its attribute path, "torch.nn.functional.linear"; None when there is none (a closure)."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is None:
            continue
        for name in parts[length:]:
            found = getattr(found, name, None)
        return found if callable(found) else None
    return None


def _signature(graph: ModelGraph, call: Call) -> str:
    """Name what a call's time depends on: function, shapes, dtypes, which need gradients, other arguments."""

    def text(leaf: Any) -> str:
        if isinstance(leaf, Ref):
            value = graph.values[leaf.value]
            return f"{value.dtype}{list(value.shape)}{'g' if value.requires_grad else ''}"
        if isinstance(leaf, Weight):
            info = graph.parameter[leaf.name]
            return f"{info.dtype}{list(info.shape)}{'w' if info.trainable and not info.is_buffer else 'b'}"
        return repr(leaf)

    return digest(f"{call.function}({_map(call.arguments, text)})")


def _map(template: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(template, tuple | list):
        kind = tuple if isinstance(template, torch.Size) else type(template)
        return kind(_map(item, change) for item in template) if not hasattr(template, "_fields") else template
    if isinstance(template, dict):
        return {key: _map(item, change) for key, item in template.items()}
    if isinstance(template, slice):
        return slice(_map(template.start, change), _map(template.stop, change), _map(template.step, change))
    return change(template)


def _replay(graph: ModelGraph, call: Call, device: str) -> tuple[float, float] | None:
    """Return the seconds of a call's forward and backward, or None when it cannot be made alone."""
    function = resolve(call.function)
    if function is None:
        return None
    written = set(call.writes)
    made: dict[Any, torch.Tensor] = {}

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Ref | Weight):
            return leaf
        if leaf not in made:
            made[leaf] = _random(graph, leaf, device)
        # A leaf that needs a gradient may not be written in place; what stands there in the program is no leaf.
        return made[leaf].clone() if isinstance(leaf, Ref) and leaf.value in written else made[leaf]

    try:
        args, kwargs = _map(call.arguments, tensor)
        activations = [x for leaf, x in made.items() if isinstance(leaf, Ref)]
        forward = _seconds(lambda: function(*args, **kwargs), device, _chill(call, device, activations))
        if not has_backward(graph, call):
            return forward, 0.0
        outputs = [out for out in _tensors(function(*args, **kwargs)) if out.requires_grad]
        inputs = [x for x in made.values() if x.requires_grad]
        if not outputs or not inputs:
            return forward, 0.0
        ones = [torch.ones_like(out) for out in outputs]

        def backward() -> None:
            for x in inputs:  # adding up over micro-batches has a price of its own (cost.model.accumulate_seconds)
                x.grad = None
            torch.autograd.backward(outputs, ones, retain_graph=True, inputs=inputs)

        return forward, _seconds(backward, device, _chill(call, device, ones))
    except Exception:  # whatever a call does not like about its random inputs, or memory: its time is estimated
        return None


def _random(graph: ModelGraph, leaf: Ref | Weight, device: str) -> torch.Tensor:
    info = graph.values[leaf.value] if isinstance(leaf, Ref) else graph.parameter[leaf.name]
    needs = info.requires_grad if isinstance(leaf, Ref) else info.trainable and not info.is_buffer  # type: ignore[union-attr]
    dtype = getattr(torch, info.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        # Away from zero, so that logarithms, roots and quotients stay ordinary numbers.
        return (
            torch.empty(info.shape, dtype=dtype, device=device)
            .fill_(0.5)
            .add_(torch.rand(info.shape, dtype=torch.float32, device=device), alpha=0.5)
            .requires_grad_(needs)
        )
    return torch.full(info.shape, dtype is torch.bool, dtype=dtype, device=device)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in _tensors(item)] if isinstance(result, tuple | list) else []


def _chill(call: Call, device: str, fresh: list[torch.Tensor]) -> Callable[[], None] | None:
    """Give what makes a processor's caches as they are in the program: weights and saved tensors gone, `fresh` there.

    Alone, over and over, a call would find its weights in the cache, which they leave between two micro-batches of a
    model that is larger. Small calls are left alone: they are bound by their launch.
    """
    if device != "cpu" or call.bytes < CHILLED_BYTES:
        return None
    other = torch.zeros(EVICTED_BYTES // 4)

    def chill() -> None:
        other.add_(1.0)
        for tensor in fresh:
            tensor.sum()

    return chill


def _seconds(action: Callable[[], Any], device: str, before: Callable[[], None] | None = None) -> float:
    """Return the median seconds of a few runs after one to warm up, less what asking for the time takes.

    `before` is done ahead of each run, outside the time.
    """
    wait = (lambda: None) if device == "cpu" else torch.accelerator.synchronize

    def once() -> float:
        if before is not None:
            before()
        begin = time.perf_counter()
        action()
        wait()
        return time.perf_counter() - begin

    warm = once()
    most = MOST_REPEATS if before is None else CHILLED_REPEATS
    repeats = min(most, max(LEAST_REPEATS, int(REPEAT_SECONDS / max(warm, 1e-9))))
    begin = time.perf_counter()
    asking = time.perf_counter() - begin
    return max(statistics.median(once() for _ in range(repeats)) - asking, 0.0)


@contextmanager
def _quiet(device: str, threads: int | None) -> Iterator[int]:
    """Leave random generators, threads and warnings as they were; yield the number of threads inside."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(enabled=True, devices=None if device != "cpu" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if threads is not None and threads != before:
            torch.set_num_threads(threads)
        try:
            with torch.enable_grad():
                yield torch.get_num_threads()
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
