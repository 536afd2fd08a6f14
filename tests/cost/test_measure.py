"""Measured times: every call of a real model replayed, against the model itself; the cache; what cannot be replayed."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.cost.cache import load_table, machine_key, save_table
from headway.cost.measure import _seconds, measure_calls, measure_rates, resolve
from headway.graph.record import record


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), torch.zeros_like(batch))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1))


def test_sum_of_calls_is_near_the_whole_model(model: nn.Module) -> None:
    batch = torch.randn(2048, 256)
    times = measure_calls(record(model, loss, batch), threads=1)
    assert times.estimated == 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        for _ in range(5):
            begin = time.perf_counter()
            loss(model, batch).backward()
            taken.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    # A wide margin: other processes may be busy on this machine.
    assert 0.4 * min(taken) < times.total < 2.5 * max(taken)


def test_equal_calls_are_timed_once_and_all_calls_have_seconds(model: nn.Module) -> None:
    graph = record(model, loss, torch.randn(8, 256))
    times = measure_calls(graph, threads=1)
    linears = [call.index for call in graph.calls if call.function.endswith("linear")]
    # The first takes the batch, which needs no gradient; the others are alike.
    assert times.forward[linears[1]] == times.forward[linears[2]]
    assert all(seconds > 0 for seconds in times.forward)
    assert all(times.backward[index] > 0 for index in linears)


def test_a_call_without_arguments_is_estimated_and_counted(model: nn.Module) -> None:
    graph = record(model, loss, torch.randn(64, 256))
    unknown = replace(graph, calls=tuple(replace(call, arguments=None, function="a.closure") for call in graph.calls))
    assert measure_calls(unknown, threads=1).estimated == pytest.approx(1.0)
    one = next(call for call in graph.calls if call.function.endswith("gelu"))
    some = replace(graph, calls=tuple(replace(c, arguments=None) if c is one else c for c in graph.calls))
    times = measure_calls(some, threads=1)
    assert 0 < times.estimated < 0.5
    assert times.forward[one.index] > 0 and times.backward[one.index] > 0


def test_in_place_calls_and_value_reads_are_replayed() -> None:
    def program(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        x.mul_(2)
        x[:, 0] = 1.0
        mask = batch[:, 0] > 10
        if mask.any().item():
            x = x + 1
        return x.square().mean()

    graph = record(nn.Linear(16, 16), program, torch.randn(4, 16))
    assert measure_calls(graph, threads=1).estimated == 0.0


def test_calls_that_take_a_shape_are_replayed() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y = model(batch)
        return (y.view(y.shape) + torch.zeros(y.shape) + y.expand(y.size()).reshape(y.shape[:1] + y.shape[1:])).mean()

    times = measure_calls(record(nn.Linear(8, 8), loss, torch.randn(4, 8)), threads=1)
    assert times.estimated == 0.0 and all(seconds > 0 for seconds in times.forward)


def test_no_time_left_means_estimates(model: nn.Module) -> None:
    assert measure_calls(record(model, loss, torch.randn(64, 256)), threads=1, budget=0.0).estimated == pytest.approx(
        1.0
    )


def test_random_generators_and_threads_stay(model: nn.Module) -> None:
    graph = record(model, loss, torch.randn(8, 256))
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    measure_calls(graph, threads=1)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads


def test_times_are_remembered(model: nn.Module, tmp_path: Path) -> None:
    path, graph = tmp_path / "deep" / "times.json", record(model, loss, torch.randn(8, 256))
    first = measure_calls(graph, threads=1, cache_path=path)
    assert measure_calls(graph, threads=1, cache_path=path, budget=0.0) == first
    # Another number of processes at once is another measurement.
    assert measure_calls(graph, threads=1, cache_path=path, concurrent=2, budget=0.0).estimated > 0.9
    path.write_text(path.read_text()[:50])
    assert measure_calls(graph, threads=1, cache_path=path).estimated == 0.0
    assert json.loads(path.read_text())["machines"]
    assert [item.name for item in path.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"format": 1, "machines": {"m": {"a": 3}}}', "\x00\xff"])
def test_a_damaged_cache_is_ignored_and_written_anew(content: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)
    assert load_table(path, "m") == {}
    save_table(path, "m", {"a": (1.0, 2.0)})
    save_table(path, "other", {"a": (3.0, 4.0)})
    assert load_table(path, "m") == {"a": (1.0, 2.0)}


def test_several_writers_never_leave_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"

    def write(number: int) -> None:
        for turn in range(20):
            save_table(path, "m", {f"{number}.{turn}": (1.0, 2.0)})
            assert load_table(path, "m")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert load_table(path, "m")
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save_table(tmp_path / "file" / "times.json", "m", {"a": (1.0, 2.0)})
    assert load_table(tmp_path / "file" / "times.json", "m") == {}


def test_rates() -> None:
    rates = measure_rates(threads=1)
    assert 1e8 < rates.flops < 1e13 and 1e8 < rates.bandwidth < 1e13 and 0 < rates.gap < 1e-2
    assert rates.device(1 << 30).rate("float32") == rates.flops


def test_functions_are_found_by_name() -> None:
    assert resolve("torch.nn.functional.linear") is F.linear
    assert resolve("torch.Tensor.add") is torch.Tensor.add
    assert resolve("torch.Tensor.no_such_call") is None
    assert resolve("nowhere.at.all") is None


def test_key_names_what_seconds_depend_on() -> None:
    keys = {machine_key(v, d, t, c) for v in ("2.13", "2.14") for d in ("cpu", "cuda") for t in (1, 2) for c in (1, 2)}
    assert len(keys) == 16


def test_what_is_done_before_a_run_is_not_counted() -> None:
    done: list[str] = []

    def prepare() -> None:
        done.append("before")
        time.sleep(0.02)

    assert _seconds(lambda: done.append("run"), "cpu", prepare) < 0.01
    assert done[:2] == ["before", "run"] and done.count("before") == done.count("run")
