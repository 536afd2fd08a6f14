"""The large zoo: hundreds of families recorded, cut in two and four and compared, and a sample in real processes.

`make zoo` runs it, with what libraries are installed; another folder for the given zoo goes by ZOO=folder, and a part
of the names by ZOO_ONLY="timm,torch nerf". A table by library ends it.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import headway
from headway.collective.world import World
from headway.run.microbatch import cut
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks
from tests.zoo.everything import families
from tests.zoo.looking import COLUMNS, Family, Look, built, by_samples, look_at, takes_double

SECONDS = 300
"""A family may take this long."""
SAMPLE = 40
"""So many families go through real processes."""

KNOWN = {
    "torch tree_recursion": "another tree in each batch: a cut inside it cannot be found again",
    "torch early_exit": "a batch that goes on where the recorded one stopped takes layers that no call had shown",
    "torch tree_lstm": "another tree, and more leaves, than recorded",
    "torch adapted_by_gradient": "more tasks than recorded, each with all weights",
    "torch proposals": "more images than recorded, each of which uses what the whole batch made",
    "vector_quantize_pytorch sim_vq": "on one sample other torch calls are made of the same expression (einx)",
    "titans_pytorch memory": "a scan that halves its length goes round less often on shorter sequences",
    "vit_pytorch ats": "chooses tokens by value, and other calls with them",
}
"""Families that do not always pass, and why."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Stop what takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def train_on_two(world: World, name: str) -> float:
    """Train a step in two stages with two micro-batches; gives the largest relative difference of this rank."""
    family = families()[name]
    double = takes_double(family)
    model, loss, batch = built(family, 0, double=double)
    whole, _, _ = built(family, 0, double=double)
    half = _samples(batch) // 2
    for start in (0, half):
        (loss(whole, cut(batch, start, start + half)) / 2).backward()
    fixed = {"pipeline": 2, "num_micro_batches": 2, "schedule": "one_f_one_b"}
    plan = headway.plan(model, loss, batch, cluster=f"{world.size}xcpu:8GiB", fixed=fixed)
    parallel = ParallelModel(model, loss, plan, world)
    parallel.forward_backward(batch)
    want = dict(whole.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in want.values() if p.grad is not None)
    worst = 0.0
    for key, parameter in parallel.named_parameters():
        expected = want[key].grad
        if parameter.grad is not None and expected is not None:
            worst = max(worst, float((parameter.grad - expected).abs().max()) / largest)
    return worst


def _samples(batch: Any) -> int:
    return next(t.shape[0] for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor))


def fit_for_processes(table: dict[str, Family], names: list[str], looks: dict[str, Look]) -> list[str]:
    """Choose families, evenly over all, whose batch has two samples or more and that draw no random numbers."""
    fit = []
    for name in names:
        graph = looks[name].graph
        if graph is None or graph.random or graph.samples % 2 or not graph.cuts:
            continue
        if by_samples(built(table[name], 0, double=False)[2]):
            fit.append(name)
    return fit[:: max(1, len(fit) // SAMPLE)][:SAMPLE]


@pytest.mark.zoo
@pytest.mark.timeout(6 * 3600)
@pytest.mark.filterwarnings("ignore")
def test_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    only = [part for part in os.environ.get("ZOO_ONLY", "").split(",") if part]
    table = {name: f for name, f in families().items() if not only or name.startswith(tuple(only))}
    done: dict[str, list[str]] = {}
    looks: dict[str, Look] = {}
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}

    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    for name, family in table.items():
        start, columns = time.perf_counter(), []
        try:
            with at_most(SECONDS):
                for column, look in look_at(family, name):
                    columns.append(column)
                    looks[name] = look
        except Exception as error:
            if columns and name not in KNOWN:
                failures[name] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        done[name], seconds[name] = columns, time.perf_counter() - start
        say(f"{name:45} {seconds[name]:5.1f} s  {' '.join(columns):65} {failures.get(name, '')}")
    for name in fit_for_processes(table, [n for n in table if "equal" in done[n] and n not in failures], looks):
        try:
            far = max(on_ranks(2, train_on_two, name, timeout=180.0, deadline=60.0))
            assert far < 1e-3, f"{far:.1e}"
            done[name].append("processes")
        except BaseException as error:  # pytest.fail is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            done[name].append("processes tried")
            failures[f"{name} in processes"] = str(error).replace("\n", " ")[-300:]
        say(f"{name:45} {done[name][-1]} {failures.get(f'{name} in processes', '')}")
    say(as_table(done, looks, seconds))
    for name, reason in failures.items():
        say(f"{name}: {reason}")
    assert not failures


def as_table(done: dict[str, list[str]], looks: dict[str, Look], seconds: dict[str, float]) -> str:
    """Count by library what went well; balance and seconds are medians, tensors the most."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name in done:
        rows[name.split()[0]].append(name)
    columns = (*COLUMNS, "processes")
    lines = ["\n| | families | " + " | ".join(columns) + " | balance | tensors | seconds |", "| --- " * 14 + "|"]
    for library, names in rows.items():
        cells = [library, str(len(names)), *(str(sum(column in done[n] for n in names)) for column in columns)]
        seen = [looks[n] for n in names if n in looks and looks[n].balance]
        cells.append(f"{statistics.median(look.balance for look in seen):.2f}" if seen else "")
        cells.append(str(max(look.crossing for look in seen)) if seen else "")
        cells.append(f"{statistics.median(seconds[n] for n in names):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
