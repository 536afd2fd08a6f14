"""search: prices every layout, schedule and micro-batch that could be run, and returns the best as a Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from headway.cost.cluster import Cluster
from headway.cost.model import Times
from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.planner.candidates import choices, sizes
from headway.planner.choice import Setting
from headway.planner.field import NEARLY, Entry, Field, choose, runners_up
from headway.planner.fingerprint import fingerprint
from headway.planner.fixed import Fixed, read_fixed
from headway.planner.plan import Plan, RunnerUp
from headway.planner.price import Priced
from headway.planner.reasons import binding, nothing_fits, reasons
from headway.planner.refine import SEARCHED, refined
from headway.planner.shard import SHARDS, not_sliced
from headway.planner.sizes import Programs
from headway.planner.wire import menu

SHOWN = 3
"""How many runners-up a plan names."""


def search(
    graph_at: Callable[[int], ModelGraph],
    times_of: Callable[[ModelGraph], Times],
    cluster: Cluster,
    *,
    global_batch: int,
    optimizer_states: int = 2,
    fixed: Mapping[str, object] | None = None,
    codec_work: Mapping[str, float] | None = None,
    slices: bool = True,
) -> Plan:
    """Choose how to train a model on a cluster.

    `graph_at(samples)` is the recorded program for a micro-batch of that many samples, with the same cuts for each;
    `times_of(graph)` the seconds of its calls. `global_batch` counts the samples of a step over all ranks,
    `optimizer_states` the tensors that the optimizer keeps for each parameter (2 for AdamW), `slices` says whether it
    works on slices of parameters; `fixed` are the decisions already made (fields of `Plan`), `codec_work` the measured
    seconds that each codec needs for a byte of gradients (without it they stay exact). Every copies x stages that uses
    all ranks is tried, with every schedule and number of micro-batches, cut by the exact balancer and priced by
    simulation; fewer ranks only where all cannot be used. Where copies of the whole model do not fit, copies that share
    out states, gradients or parameters are tried too.
    The fastest that fits in memory wins; within 1 %, the one of fewest stages, largest micro-batches, least memory.

    Raises PlanError for a value of `fixed` that cannot be used, and when nothing fits in memory.
    """
    programs = Programs(graph_at, times_of)
    first = programs.any_graph(global_batch)
    precision = next((info.dtype for info in first.parameters if info.trainable), "float32")
    decided = read_fixed(fixed, size=cluster.size, global_batch=global_batch, graph=first, precision=precision)
    wires = menu(decided.codec, codec_work, cluster)
    setting = Setting(cluster, global_batch, optimizer_states, wires, decided.sync_every or 1, decided.shard_ranks)
    if decided.shard == "parameters" and not slices:
        raise not_sliced()
    most = len(first.cuts) + 1
    field = filled(programs, setting, decided, most, slices=slices)
    best = choose(field)
    # A size that was not recorded is recorded before a plan is made with it.
    if best is not None and not programs.confirm(sizes(best.choice, global_batch)):
        field = filled(programs, setting, decided, most, slices=slices)
        best = choose(field)
    if best is None:
        raise nothing_fits(field)
    program = programs.at(max(sizes(best.choice, global_batch)))
    asked = decided.schedule == SEARCHED
    best, order = refined(best, setting, asked=asked, worth=NEARLY) if asked or not decided.schedule else (best, None)
    why = reasons(best, field, program)
    plan = _plan_of(best, field, precision, (why[0], order, *why[1:]) if order else why)
    blocks = program.shape.blocks if plan.shard == "parameters" else ()
    return replace(plan, blocks=blocks, made_for=fingerprint(program.graph, cluster))


def filled(programs: Programs, setting: Setting, fixed: Fixed, max_stages: int, *, slices: bool) -> Field:
    """Return all candidates: plain ones, and copies that share something out.

    Those of the whole model if plain copies do not fit, of stages if nothing does. Parameters are shared out by copies
    of the whole model alone.
    Raises PlanError when what is fixed leaves no candidate, and what the model raises when it takes none.
    """
    field = Field(setting)
    field.add(entries(programs, setting, fixed, max_stages))
    copies = field.every(lambda choice: choice.num_stages == 1 and choice.data > 1)
    if fixed.shard is not None or setting.cluster.size == 1 or any(c.peak <= field.memory for c in copies):
        return field
    for pipeline in (1, None):
        if pipeline and (fixed.pipeline or 1, fixed.chunks or 1, fixed.cuts or ()) != (1, 1, ()):
            continue
        if pipeline is None and field.any_fits():
            break
        for shard in SHARDS:
            if shard == "none" or shard == "parameters" and not (pipeline and slices):
                continue
            wanted = replace(fixed, shard=shard, pipeline=pipeline or fixed.pipeline)
            wanted = replace(wanted, chunks=1) if shard == "gradients" else wanted
            try:
                found = entries(programs, setting, wanted, max_stages)
            except PlanError:
                continue  # what else is fixed leaves nothing to share out
            known = set(field.choices)
            field.add(entry for entry in found if entry.choice.data > 1 and entry.choice not in known)
    return field


def entries(programs: Programs, setting: Setting, fixed: Fixed, max_stages: int) -> list[Entry]:
    """List the candidates whose micro-batches the model takes.

    Raises PlanError when what is fixed leaves no candidate, and what the model raises when it takes none.
    """
    result: list[Entry] = []
    refused: Exception | None = None
    tried = list(choices(fixed, setting.cluster.size, setting.global_batch, max_stages))
    wanted = [sizes(choice, setting.global_batch) for choice in tried]
    programs.expect(size for each in wanted for size in each)
    for choice, samples in zip(tried, wanted, strict=True):
        error = programs.refused(samples)
        refused = refused or error
        if error is None:
            result.append(Entry(choice, programs.at(max(samples)), fixed.cuts))
    if not result and refused is not None:
        raise refused
    if not result:
        raise PlanError(
            f"no plan for {setting.global_batch} samples a step is left by what is fixed: "
            + ", ".join(f"{name}={value!r}" for name, value in vars(fixed).items() if value not in (None, ())),
            place="fixed=",
            remedy="leave one of them out; micro_batch * num_micro_batches must cover a copy's samples",
        )
    return result


def _plan_of(best: Priced, field: Field, precision: str, why: tuple[str, ...]) -> Plan:
    memory, choice, setting = field.memory, best.choice, field.setting
    return Plan(
        data=choice.data,
        pipeline=choice.pipeline,
        chunks=choice.chunks,
        schedule=choice.schedule,
        order=choice.given,
        shard=choice.shard,
        shard_ranks=best.shard_ranks,
        micro_batch=choice.micro_batch,
        num_micro_batches=choice.num_micro_batches,
        global_batch=setting.global_batch,
        cuts=best.cuts,
        precision=precision,
        codec=best.codec,
        neighbours=best.neighbours,
        bucket_bytes=best.bucket_bytes,
        sync_every=setting.sync_every,
        split=best.split,
        cluster=setting.cluster.describe(),
        device_memory=memory,
        seconds=best.seconds,
        memory=tuple(peak for peak in best.memory for _ in range(choice.data)),
        reasons=why,
        runners_up=tuple(_runner_up(other, memory) for other in runners_up(field, best, SHOWN)),
        binding=binding(best, field),
        stages=best.stages,
        messages=best.messages,
    )


def _runner_up(other: Priced, memory: int) -> RunnerUp:
    return RunnerUp(
        data=other.choice.data,
        pipeline=other.choice.pipeline,
        chunks=other.choice.chunks,
        schedule=other.choice.schedule,
        micro_batch=other.choice.micro_batch,
        num_micro_batches=other.choice.num_micro_batches,
        seconds=other.seconds,
        memory=other.peak,
        fits=other.peak <= memory,
        shard=other.choice.shard,
    )
