"""search against brute force over all layouts, schedules and micro-batches; memory pressure; refusals."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from headway.cost.cluster import Cluster, Device, Link
from headway.cost.memory import RUNTIME_BYTES_CPU
from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.planner.bound import least_seconds
from headway.planner.choice import Choice, Setting
from headway.planner.cuts import cut_and_price
from headway.planner.plan import Plan, micro_batches, shares
from headway.planner.price import Priced, price
from headway.planner.program import Program
from headway.planner.search import search
from headway.schedule.catalogue import CATALOGUE
from tests.cost.graphs import chain, times


def machine(size: int, memory: int, *, bandwidth: float = 1e9, latency: float = 1e-5) -> Cluster:
    device = Device("cpu", memory, 1e10, 1e10, 1e9)
    return Cluster(f"{size}xcpu:1GiB", device=device, link_inside=Link(latency, bandwidth))


def random_case(seed: int) -> tuple[list[int], list[float], Cluster, int, float]:
    rng = random.Random(seed)
    widths = [rng.choice((16, 64, 200)) for _ in range(rng.randint(3, 6))]
    seconds = [rng.uniform(1e-4, 3e-3) for _ in range(len(widths))]
    memory = RUNTIME_BYTES_CPU + int(10 ** rng.uniform(5.3, 6.5))
    cluster = machine(
        rng.choice((1, 2, 3, 4, 6)), memory, bandwidth=10 ** rng.uniform(6, 10), latency=10 ** rng.uniform(-6, -3)
    )
    return widths, seconds, cluster, rng.randint(4, 8), rng.choice((0.0, 1e-3))


def brute_force(graph_at, times_of, setting: Setting) -> list[Priced]:
    """Price every copies x stages that uses all ranks, every schedule, every number of micro-batches."""
    found, size, batch = [], setting.cluster.size, setting.global_batch
    for data in range(1, size + 1):
        for pipeline in range(1, size + 1):
            if data * pipeline != size or data > batch or pipeline > len(graph_at(1).cuts) + 1:
                continue
            several = [
                (name, chunks)
                for name, entry in CATALOGUE.items()
                for chunks in (1, 2, 4)
                if name != "backward_first" and entry.allows(chunks) and pipeline * chunks <= len(graph_at(1).cuts) + 1
            ]
            for schedule, chunks in several if pipeline > 1 else [("gpipe", 1), ("one_f_one_b", 1)]:
                for count in range(1, batch // data + 1):
                    most = max(micro_batches(-(-batch // data), count))
                    program = Program.of(graph_at(most), times_of(graph_at(most)))
                    found.append(cut_and_price(program, Choice(data, pipeline, schedule, most, count, chunks), setting))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_search_is_as_good_as_brute_force(seed: int) -> None:
    widths, seconds, cluster, batch, per_call = random_case(seed)

    def graph_at(samples: int) -> ModelGraph:
        return chain(samples, widths)

    def times_of(graph: ModelGraph):
        return times(graph, seconds, per_call)

    every = brute_force(graph_at, times_of, Setting(cluster, batch, 2))
    memory = cluster.device.memory_bytes
    fitting = [candidate for candidate in every if candidate.peak <= memory]
    if not fitting:
        with pytest.raises(PlanError, match="nothing fits"):
            search(graph_at, times_of, cluster, global_batch=batch, fixed={"shard": "none"})
        return
    plan = search(graph_at, times_of, cluster, global_batch=batch, fixed={"shard": "none"})
    assert plan.seconds is not None
    assert plan.seconds <= min(candidate.seconds for candidate in fitting) * 1.01
    assert max(plan.memory) <= memory
    # Of those as fast, none has fewer stages, nor as few with larger micro-batches.
    near = [c for c in fitting if c.seconds <= min(c.seconds for c in fitting) * 1.01]
    simplest = min((c.choice.num_stages, c.choice.pipeline, -c.choice.micro_batch) for c in near)
    assert (plan.pipeline * plan.chunks, plan.pipeline, -plan.micro_batch) == simplest


@pytest.mark.parametrize("seed", range(25))
def test_cuts_are_near_the_best_of_all_cuts_and_fit_when_any_do(seed: int) -> None:
    rng = random.Random(seed)
    widths = [rng.choice((16, 64, 200)) for _ in range(7)]
    graph = chain(3, widths, tied=rng.random() < 0.3 and widths[0] == widths[-2] and widths[1] == widths[-1])
    program = Program.of(graph, times(graph, [rng.uniform(1e-4, 3e-3) for _ in graph.calls]))
    pipeline = rng.choice((2, 3))
    choice = Choice(1, pipeline, rng.choice(("gpipe", "one_f_one_b")), 3, 6)
    free = Setting(machine(pipeline, 1 << 40), 18, 2)
    every = [price(program, choice, names, free) for names in combinations([c.name for c in graph.cuts], pipeline - 1)]
    peaks = sorted(candidate.peak for candidate in every)
    for memory in (peaks[0], peaks[len(peaks) // 3], 1 << 40):
        fitting = [candidate for candidate in every if candidate.peak <= memory]
        found = cut_and_price(program, choice, Setting(machine(pipeline, memory), 18, 2))
        assert found.peak <= memory
        # The balancer makes the slowest stage as fast as can be; a whole schedule can be a little faster otherwise.
        assert found.seconds <= 1.1 * min(candidate.seconds for candidate in fitting)


def plan_for(cluster: Cluster, **kwargs: object) -> Plan:
    return search(lambda n: chain(n, (256,) * 9), times, cluster, global_batch=8, **kwargs)  # type: ignore[arg-type]


def test_memory_pressure_turns_copies_into_stages() -> None:
    # 8 layers of 256 KiB: parameters, gradients and two states take 8 MiB, half of that on each of two stages.
    roomy = plan_for(machine(2, RUNTIME_BYTES_CPU + (12 << 20)))
    tight = plan_for(machine(2, RUNTIME_BYTES_CPU + (6 << 20)))
    assert (roomy.data, roomy.pipeline) == (2, 1) and roomy.reasons[0].startswith("a whole model fits")
    assert (tight.data, tight.pipeline) == (1, 2)
    assert tight.reasons[0].startswith("a whole model does not fit: with gradients and AdamW's states it needs 40")
    assert tight.reasons[0].endswith("a rank has 38 MiB")
    assert max(tight.memory) <= RUNTIME_BYTES_CPU + (6 << 20)
    plain = plan_for(machine(2, RUNTIME_BYTES_CPU + (6 << 20)), fixed={"schedule": "one_f_one_b", "shard": "none"})
    assert plain.binding.startswith("memory") and plain.pipeline == 2
    (copies,) = plain.runners_up
    assert copies.data == 2 and not copies.fits


def test_a_slow_link_turns_copies_into_stages() -> None:
    fast, slow = plan_for(machine(2, 1 << 30)), plan_for(machine(2, 1 << 30, bandwidth=1e7))
    assert fast.pipeline == 1 and slow.pipeline == 2
    assert any("reducing gradients" in reason for reason in slow.reasons)


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(PlanError) as caught:
        plan_for(machine(2, RUNTIME_BYTES_CPU + (3 << 20)))
    need = caught.value
    assert "the leanest plan needs" in need.fact and "a rank has 35 MiB" in need.fact
    assert need.place and need.remedy and "more processes" in need.remedy


def test_the_whole_model_must_fit_while_it_is_built() -> None:
    # 2 MiB of parameters are built on each rank even when a stage then keeps a quarter of them
    with pytest.raises(PlanError) as caught:
        plan_for(machine(8, RUNTIME_BYTES_CPU + (1 << 20)), optimizer_states=0)
    assert "built" in (caught.value.place or "")


def test_the_timeline_ends_when_the_plan_says() -> None:
    plan = plan_for(machine(4, 1 << 30), fixed={"pipeline": 2})
    assert plan.timeline is not None and plan.seconds is not None
    assert plan.timeline.makespan + plan.update_seconds == pytest.approx(plan.seconds)


def test_ranks_that_no_layout_can_use_stay_idle_and_it_is_said() -> None:
    # 3 samples, one place to cut: at most 3 copies x 2 stages
    plan = search(lambda n: chain(n, (8,)), times, machine(7, 1 << 30), global_batch=3, fixed={"data": 3})
    assert plan.size < 7 and "stay idle" in plan.reasons[0]


def test_sizes_that_the_model_does_not_take_are_left_out() -> None:
    def graph_at(samples: int) -> ModelGraph:
        if samples == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return chain(samples, (64,) * 5)

    plan = search(graph_at, times, machine(2, 1 << 30), global_batch=6)
    copies = shares(plan.global_batch, plan.data)
    assert all(min(micro_batches(share, plan.num_micro_batches, plan.micro_batch)) > 1 for share in copies)
    with pytest.raises(ValueError, match="more than 1 value"):
        search(graph_at, times, machine(2, 1 << 30), global_batch=2, fixed={"data": 2})


def test_micro_batches_in_flight() -> None:
    assert Choice(1, 3, "gpipe", 1, 5).order.in_flight == (5, 5, 5)
    assert Choice(1, 3, "one_f_one_b", 1, 5).order.in_flight == (3, 2, 1)
    assert Choice(1, 3, "one_f_one_b", 1, 2).order.in_flight == (2, 2, 1)
    assert Choice(1, 1, "one_f_one_b", 1, 4).order.in_flight == (1,)


@pytest.mark.parametrize("seed", range(12))
def test_no_candidate_is_faster_than_its_bound(seed: int) -> None:
    """Over all cuts, schedules and numbers of micro-batches."""
    rng = random.Random(seed)
    graph = chain(2, [rng.choice((16, 64, 200)) for _ in range(6)])
    program = Program.of(graph, times(graph, [rng.uniform(1e-4, 3e-3) for _ in graph.calls]))
    names = [c.name for c in graph.cuts]
    for schedule, entry in CATALOGUE.items():
        for pipeline in (1, 2, 3):
            if pipeline * entry.least > 4:
                continue
            for count in (1, 2, 5):
                choice = Choice(1, pipeline, schedule, 2, count, entry.least)
                setting = Setting(machine(pipeline, 1 << 40, bandwidth=1e15, latency=0.0), 2 * count, 2)
                least = least_seconds(program, choice, setting)
                for cuts in combinations(names, choice.num_stages - 1):
                    assert price(program, choice, cuts, setting).seconds >= least * (1 - 1e-9)
