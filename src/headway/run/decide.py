"""decide: headway.plan: records the model, measures this machine, searches, and makes all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.collective.probe import measure_codecs, measure_link
from headway.collective.world import DEADLINE, World
from headway.cost.cache import load_table, machine_key, save_table
from headway.cost.cluster import Cluster, Link
from headway.cost.measure import measure_calls, measure_rates
from headway.cost.model import Times, estimate_times
from headway.errors import BatchError, HeadwayError, PlanError, SplitError
from headway.graph.model import Cut, ModelGraph
from headway.graph.record import record_run
from headway.graph.rows import with_owners
from headway.journal import Journal
from headway.launch.identity import Identity, describe, identify
from headway.launch.plan_only import PlanDone
from headway.layout.split import split
from headway.planner import advise as rules
from headway.planner.advise import Advice
from headway.planner.plan import Plan
from headway.planner.search import search
from headway.report.check import Checked, leaf_text, tried_text
from headway.run.arguments import check_plan, check_planned
from headway.run.microbatch import Mean, batch_leaves, copied, cut, num_samples, read_loss
from headway.run.verify import verify_split
from headway.run.weighing import Weighing, weigh

Loss = Callable[[nn.Module, Any], Any]

CHECK_SAMPLES = 3
"""Samples that `headway check` records for: few, and no size that a dim of a model is likely to have by chance."""


def plan(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    cluster: Cluster | str | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    fixed: Mapping[str, object] | None = None,
    verify: bool = True,
) -> Plan:
    """Choose how to train `model` on the processes of this job, or on another `cluster`.

    `batch` is one global batch: any pytree of tensors with samples along dim 0; `loss(model, batch)` a scalar mean, a
    `Mean`, or (either, metrics). `model` may be on meta. `optimizer` says how many states each parameter has. `fixed`
    pins fields of the plan. With `verify` a division into stages is tried against the undivided model on a few
    samples before it is returned. Every rank calls it, and all get the same plan.

    Raises PlanError when nothing fits or a fixed value cannot be used, BatchError for a batch that cannot be shared
    out, TypeError when the loss is not a scalar, SplitError when the division does not reproduce the model.
    """
    check_planned(model, loss, cluster=cluster, optimizer=optimizer, fixed=fixed)
    identity = identify()
    request = identity.plan_only
    if request is not None and request.check:
        raise PlanDone(_checked(model, loss, batch, request.samples or CHECK_SAMPLES))
    if request is not None:
        cluster = request.cluster or cluster
        fixed = {**(fixed or {}), **request.fixed}
    samples = num_samples(batch)
    if not samples:
        raise BatchError(
            "the batch has no samples", place="headway.plan(model, loss, batch)", remedy="one global batch"
        )
    states = optimizer_states(optimizer)
    if cluster is not None:
        there = Cluster(cluster) if isinstance(cluster, str) else cluster
        times: Callable[[ModelGraph], Times] = lambda graph: estimate_times(graph, there.device)  # noqa: E731
        found = search(
            _recorder(model, loss, batch), times, there, global_batch=samples, optimizer_states=states, fixed=fixed,
            slices=takes_slices(optimizer),
        )  # fmt: skip
        found = _with_reduction(found, model, loss, batch, fixed)
    else:
        found = _plan_here(identity, model, loss, batch, samples, optimizer, fixed, verify)
    if request is not None:
        if request.save is not None:
            found.save(request.save)
        raise PlanDone(found)
    return found


def advise(model: nn.Module, loss: Loss, batch: Any, plan: Plan) -> list[Advice]:
    """Say what could be changed about a model, its batch or its plan: rules with a reason, a price and a remedy.

    `batch` is one global batch, as for `plan`; the program is recorded for the plan's micro-batch, on the cluster that
    the plan is for. Nothing is changed: what would change the training itself is only ever offered. Raises PlanError
    when the plan was made for another model, program or batch.
    """
    check_planned(model, loss, optimizer=torch.optim.AdamW)
    check_plan(plan)
    graph = _recorder(model, loss, batch)(min(plan.micro_batch, num_samples(batch)))
    machine = plan.made_for.cluster if plan.made_for else f"{plan.size}xcpu"
    cluster = Cluster(f"{machine}:{plan.device_memory}B" if plan.device_memory else machine)
    plan.check_fingerprint(graph, cluster)
    return rules.advise(graph, plan, cluster)


def _checked(model: nn.Module, loss: Loss, batch: Any, samples: int) -> Checked:
    """Record the program for `headway check`, or keep why that is refused."""
    leaves = tuple(leaf_text(place, leaf) for place, leaf in batch_leaves(batch).items())
    graph_at = _recorder(model, loss, batch)
    try:
        graph = graph_at(min(samples, num_samples(batch)))
    except HeadwayError as refusal:
        return Checked(leaves, None, refusal)
    weighs = weigh(model, loss, batch).note or ""
    if not graph.cuts:
        return Checked(leaves, graph, weighs=weighs)
    cut = _middle(graph)
    try:
        tried = verify_split(
            model, loss, batch, split(graph, (cut.name,)), graph_at, memory=identify().device_memory
        )  # fmt: skip
    except SplitError as refusal:
        return Checked(leaves, graph, refusal, weighs=weighs)
    return Checked(leaves, graph, tried=f"{tried_text(tried)} (cut at {cut.name})", weighs=weighs)


def _middle(graph: ModelGraph) -> Cut:
    """Choose the cut that divides the FLOPs most equally."""
    before = [0, *accumulate(call.flops for call in graph.calls)]
    return min(graph.cuts, key=lambda cut: abs(2 * before[cut.index] - graph.flops))


def _plan_here(
    identity: Identity, model: nn.Module, loss: Loss, batch: Any, samples: int, optimizer: type[torch.optim.Optimizer],
    fixed: Mapping[str, object] | None, verify: bool,
) -> Plan:  # fmt: skip
    world = World.start(identity, deadline=identity.deadline or DEADLINE)
    cache = Path.home() / ".cache" / "headway" / "measured.json"
    here = _this_machine(identity, world, cache)
    if world.rank == 0:
        print(describe(identity, here.describe()), flush=True)
    graph_at = _recorder(model, loss, batch)
    # On one host gradients stay exact, so nothing needs to be known.
    work = measure_codecs(world) if here.hosts > 1 else None

    def times_of(graph: ModelGraph) -> Times:
        return measure_calls(graph, world.device.type, cache_path=cache, concurrent=identity.local_size)

    # Each rank searches, so that calls are timed while the other ranks are at work too; rank 0's answer counts.
    error: PlanError | None = None
    found: Plan | None = None
    try:
        found = search(
            graph_at, times_of, here, global_batch=samples, optimizer_states=optimizer_states(optimizer), fixed=fixed,
            codec_work=work, slices=takes_slices(optimizer),
        )  # fmt: skip
        if world.rank == 0:
            found = _with_reduction(found, model, loss, batch, fixed)
    except PlanError as caught:
        error = caught
    told = world.broadcast_object((found, error))
    found, error = told
    if error is not None:
        raise error
    assert found is not None
    if verify and found.pipeline > 1:
        _verify(world, identity, model, loss, batch, found, graph_at)
    return found


def _with_reduction(found: Plan, model: nn.Module, loss: Loss, batch: Any, fixed: Mapping[str, object] | None) -> Plan:
    """Say in a plan whether losses of micro-batches are averaged or added up: as decided, or as seen on few samples."""
    given = (fixed or {}).get("reduction")
    weighed = weigh(model, loss, batch) if given is None else Weighing(str(given))
    if weighed.note is None or (not weighed.exact and found.data * found.num_micro_batches == 1):
        return replace(found, reduction=weighed.reduction)
    if not weighed.exact:
        print(f"headway: {weighed.note}", flush=True)
    return replace(found, reduction=weighed.reduction, reasons=(*found.reasons[:1], weighed.note, *found.reasons[1:]))


def _this_machine(identity: Identity, world: World, cache: Path) -> Cluster:
    """Describe what this job runs on: memory each, rates, and the link between its processes, measured once."""
    rates = measure_rates(world.device.type, cache_path=cache, concurrent=identity.local_size)
    # A group that the script made itself tells nothing of hosts: it is taken to be on this one.
    local = identity.local_size if identity.size == world.size else world.size
    link = between = None
    if local > 1:
        name = f"link:{local} processes on one host, {world.device.type}"
        machine = machine_key(torch.__version__, world.device.type, torch.get_num_threads(), local)
        known = world.broadcast_object(load_table(cache, machine).get(name))
        if known is None:
            known = world.broadcast_object(measure_link(world, range(local)))
            if world.rank == 0:
                save_table(cache, machine, {name: known})
        link = Link(*known)
    if world.size > local:
        # The network is not this machine's own, so it is measured each time: the first ranks of each host in a row.
        between = Link(*measure_link(world, range(0, world.size, local)))
    even = world.size % local == 0
    if not even:
        link = between  # no cluster has hosts of different sizes: as one host, at the network's speed
    memory = identity.device_memory
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
    return Cluster.here(
        world.size, memory, num_hosts=world.size // local if even else 1, link=link or between, link_between=between,
        flops=rates.flops, bandwidth=rates.bandwidth,
    )  # fmt: skip


@contextmanager
def _to_be_trained(model: nn.Module) -> Iterator[None]:
    """Put a model that is in eval mode (as `from_pretrained` leaves it) into train mode: a plan is for training."""
    modes = [] if model.training else [(module, module.training) for module in model.modules()]
    if modes:
        model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _recorder(model: nn.Module, loss: Loss, batch: Any) -> Callable[[int], ModelGraph]:
    """Give a function that records the program for a number of samples of the batch, each once."""
    known: dict[int, ModelGraph] = {}
    others: dict[int | None, ModelGraph | None] = {}

    def recorded(samples: int) -> ModelGraph:
        with _to_be_trained(model):
            run = record_run(model, loss, copied(cut(batch, 0, samples)), samples=samples)
        _check_loss(run.result, samples)
        return run.graph

    def graph_at(samples: int) -> ModelGraph:
        if samples not in known:
            graph = recorded(samples)
            known[samples] = graph if not graph.random else with_owners(graph, beside(samples))
        return known[samples]

    def beside(samples: int) -> ModelGraph | None:
        """Record with another number of samples, to see which random numbers are whose; None: it cannot be done."""
        few = next((few for few in (2, 3, 1) if few != samples and few <= num_samples(batch)), None)
        if few not in others:
            try:
                others[few] = None if few is None else recorded(few)
            except Exception:  # a batch norm does not take one sample, say: the shapes of one record are to tell
                others[few] = None
        return others[few]

    return graph_at


def _check_loss(result: Any, samples: int) -> None:
    """Raise TypeError unless the loss function returned what a loss is; contents are not looked at."""
    value = result[0] if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping) else result
    if isinstance(value, Mean):
        value = value.total
    read_loss(value if not isinstance(value, torch.Tensor) else torch.zeros(value.shape), samples)


def takes_slices(optimizer: Any) -> bool:
    """Tell whether an optimizer works on slices of parameters (DTensor), as far as is known: Adafactor does not."""
    return _kind(optimizer) not in ("Adafactor", "Muon")


def optimizer_states(optimizer: Any) -> int:
    """Give how many tensors of a parameter's size an optimizer (class or object) keeps for each parameter.

    Known by name; one that is not known counts as two, as Adam has.
    """
    known = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Adafactor": 0, "Lion": 1, "Muon": 1, "ASGD": 1, "Rprop": 2}
    return known.get(_kind(optimizer), 2)


def _kind(optimizer: Any) -> str:
    """Name the class of an optimizer: of itself, of an object of it, or of a `functools.partial` that makes one."""
    kind = getattr(optimizer, "func", optimizer)
    return str(getattr(kind if callable(kind) else type(kind), "__name__", ""))


def _verify(
    world: World, identity: Identity, model: nn.Module, loss: Loss, batch: Any, found: Plan,
    graph_at: Callable[[int], ModelGraph],
) -> None:  # fmt: skip
    """Try the division on rank 0, where it fits beside the limit; the others wait and hear of a failure."""
    error: Exception | None = None
    if world.rank == 0:
        try:
            assert found.split is not None
            outcome = verify_split(model, loss, batch, found.split, graph_at, memory=identity.device_memory)
            Journal(identity.run_directory, 0).write(outcome)
        except Exception as caught:
            error = caught
    error = world.broadcast_object(error)
    if error is not None:
        raise error
