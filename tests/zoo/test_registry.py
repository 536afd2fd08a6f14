"""The large zoo: each family of ../shared/zoo recorded, cut in two and four at balanced and at random places, compared.

`make zoo` runs it, with what libraries are installed; another folder goes by ZOO=folder. A table by library ends it.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from headway.graph.model import ModelGraph
from headway.graph.record import record
from headway.layout.split import split
from tests.run.staged import difference, train_staged, train_whole

FOLDER = Path(os.environ.get("ZOO", Path(__file__).parents[3] / "shared" / "zoo"))
LIMIT = 1e-6  # in float64, except where a family insists on float32
COLUMNS = ("families", "built", "recorded", "equal", "second batch", "smaller batch")

KNOWN = {
    "pt_stoch_depth": "leaves layers out at random: what crosses a cut between them depends on the draw",
}
"""Families that do not always pass, and why."""


def registry() -> Any:
    """Import the zoo."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("registry")


def as_double(value: Any) -> Any:
    """Give floating tensors twice the digits."""
    return tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.dtype is torch.float32 else t, value)


def _as_it_is(value: Any) -> Any:
    return value


def balanced(graph: ModelGraph, stages: int) -> list[str]:
    """Name the allowed cuts nearest to equal FLOPs."""
    sums, done = [], 0
    for call in graph.calls:
        sums.append(done)
        done += call.flops + call.bytes
    names = [min(graph.cuts, key=lambda c: abs(sums[c.index] - done * n / stages)).name for n in range(1, stages)]
    return list(dict.fromkeys(names))


def at_random(graph: ModelGraph, stages: int, draw: random.Random) -> list[str]:
    """Name any allowed cuts."""
    count = min(stages - 1, len(graph.cuts))
    return [graph.cuts[i].name for i in sorted(draw.sample(range(len(graph.cuts)), count))]


def smaller(batch: Any) -> Any:
    """Take the first sample alone, where every tensor has the same number of them."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not leaves or any(not t.dim() or t.shape[0] != leaves[0].shape[0] or t.shape[0] < 2 for t in leaves):
        return None
    return tree_map(lambda t: t[:1] if isinstance(t, torch.Tensor) else t, batch)


def look_at(build: Callable[[], Any], loss: Callable[[nn.Module, Any], Any], name: str) -> Iterator[tuple[str, Any]]:
    """Try one family; gives what worked, by column, and ends with the first thing that did not."""

    def fresh(seed: int = 0) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        return build()

    model, batch = fresh()
    model.train()
    convert: Callable[[Any], Any] = as_double
    try:
        loss(model.double(), as_double(batch))
    except Exception:  # a library's own constants are single
        convert = _as_it_is
        model, batch = fresh()
        loss(model, batch)
    else:
        model, batch = fresh()
        model = model.double()
    yield "built", None
    batch, second = convert(batch), convert(fresh(5)[1])
    # Keras gives each copy other names, so each copy is built like the first
    clone = (lambda _: fresh()[0].double()) if name.startswith("keras") else None
    options: dict[str, Any] = {"clone": clone} if clone else {}
    graph = record(model, loss, batch)
    yield "recorded", graph
    draw = random.Random(name)
    splits = [balanced(graph, 2), balanced(graph, 4), at_random(graph, 2, draw), at_random(graph, 4, draw)]
    for column, data in (("equal", batch), ("second batch", second), ("smaller batch", smaller(batch))):
        if data is None:
            continue
        try:
            want = train_whole(model, loss, data, graph, **options)
        except Exception:
            if column == "equal":
                raise
            continue  # the model itself does not take it
        for cuts in splits:
            got = train_staged(model, loss, data, graph.samples, split(graph, cuts), **options)
            far = difference(want, got)
            assert far < (LIMIT if convert is as_double else 1e-3), f"{column}: {far:.1e} at {cuts}"
        yield column, None


@pytest.mark.zoo
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not (FOLDER / "registry.py").exists(), reason=f"no zoo in {FOLDER}")
def test_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    zoo = registry()

    def loss(model: nn.Module, batch: Any) -> Any:
        return zoo.loss_of(model(**batch))

    table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    failures = {}
    for name, build in zoo.FAMILIES.items():
        row, start, column = table[name.split("_")[0]], time.perf_counter(), "not built"
        row["families"] += 1
        try:
            for column, _ in look_at(build, loss, name):
                row[column] += 1
        except Exception as error:
            if column != "not built" and name not in KNOWN:
                failures[name] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        with capsys.disabled():
            print(f"{name:40} {column:14} {time.perf_counter() - start:5.1f} s  {failures.get(name, '')}", flush=True)
    with capsys.disabled():
        print("\n" + "".join(f"{text:>15}" for text in ("library", *COLUMNS)))
        for library, row in table.items():
            print(f"{library:>15}" + "".join(f"{row[column]:15}" for column in COLUMNS))
    assert not failures
