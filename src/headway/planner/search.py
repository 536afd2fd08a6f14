"""search: prices every layout, schedule and micro-batch that could be run, and returns the best as a Plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from headway.cost.cluster import Cluster
from headway.cost.model import Times
from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.planner.bound import least_seconds
from headway.planner.cuts import cut_and_price
from headway.planner.fingerprint import fingerprint
from headway.planner.fixed import Fixed, read_fixed
from headway.planner.plan import Plan, RunnerUp, micro_batches, shares
from headway.planner.price import Choice, Family, Priced, Program, Setting
from headway.planner.reasons import binding, nothing_fits, reasons
from headway.planner.refine import SEARCHED, refined
from headway.planner.shard import SHARDS, gathered, not_sliced
from headway.planner.wire import menu
from headway.schedule.catalogue import CATALOGUE

NEARLY = 0.01
"""Plans whose predicted times differ by less than this part are equally fast; the simpler one is taken."""

PLAIN = ("gpipe", "one_f_one_b")
"""Schedules of one stage a rank and whole backwards."""

CHUNKS = (1, 2, 4)
"""Stages a rank that are tried where a schedule allows several."""

ALL_COUNTS = 8
"""Up to this many samples a copy, every number of micro-batches is tried."""


@dataclass(frozen=True)
class Programs:
    """The recorded program for each size of micro-batch, recorded and timed when first asked for."""

    graph_at: Callable[[int], ModelGraph]
    times_of: Callable[[ModelGraph], Times]
    graphs: dict[int, ModelGraph | Exception] = field(default_factory=dict)
    timed: dict[int, Program] = field(default_factory=dict)

    def graph(self, samples: int) -> ModelGraph | Exception:
        """Return the graph for that many samples, or why the model does not take so many."""
        if samples not in self.graphs:
            try:
                self.graphs[samples] = self.graph_at(samples)
            except Exception as error:  # the model's own: batch norm of one value, a size written into its code
                self.graphs[samples] = error
        return self.graphs[samples]

    def any_graph(self, global_batch: int) -> ModelGraph:
        """Return a graph that can be recorded, for as many samples as possible; raises what the model raises."""
        samples = global_batch
        while isinstance(self.graph(samples), Exception) and samples > 1:
            samples //= 2
        graph = self.graph(samples)
        if isinstance(graph, Exception):
            raise self.graphs[global_batch]  # type: ignore[misc]
        return graph

    def at(self, samples: int) -> Program:
        """Return the program for micro-batches of that many samples."""
        if samples not in self.timed:
            graph = self.graph(samples)
            if isinstance(graph, Exception):
                raise graph
            self.timed[samples] = Program(graph, self.times_of(graph))
        return self.timed[samples]

    def refused(self, sizes: Iterable[int]) -> Exception | None:
        """Return why the model does not take one of these sizes; None when it takes all."""
        return next((graph for graph in map(self.graph, sizes) if isinstance(graph, Exception)), None)


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
    max_stages = len(first.cuts) + 1
    candidates = price_all(programs, setting, decided, max_stages)
    memory = cluster.device.memory_bytes
    candidates += _sharing(candidates, programs, setting, decided, max_stages, slices)
    best = choose(candidates, memory)
    if best is None:
        raise nothing_fits(candidates, setting)
    program = programs.at(max(sizes(best.choice, global_batch)))
    asked = decided.schedule == SEARCHED
    best, order = refined(best, setting, asked=asked, worth=NEARLY) if asked or not decided.schedule else (best, None)
    why = reasons(best, candidates, setting, program)
    plan = _plan_of(best, candidates, setting, precision, (why[0], order, *why[1:]) if order else why)
    blocks = gathered(program.graph) if plan.shard == "parameters" else ()
    return replace(plan, blocks=blocks, made_for=fingerprint(program.graph, cluster))


def _sharing(
    candidates: list[Priced], programs: Programs, setting: Setting, fixed: Fixed, max_stages: int, slices: bool
) -> list[Priced]:
    """Price copies that share something out: of the whole model if plain ones do not fit, of stages if nothing does.

    Parameters are shared out by copies of the whole model alone.
    """
    memory = setting.cluster.device.memory_bytes
    found: list[Priced] = []
    copies = [c for c in candidates if c.choice.num_stages == 1 and c.choice.data > 1]
    if fixed.shard is not None or setting.cluster.size == 1 or any(c.peak <= memory for c in copies):
        return []
    for pipeline in (1, None):
        if pipeline and (fixed.pipeline or 1, fixed.chunks or 1, fixed.cuts or ()) != (1, 1, ()):
            continue
        if any(c.peak <= memory for c in (*found, *(candidates if pipeline is None else ()))):
            break
        for shard in SHARDS:
            if shard == "none" or shard == "parameters" and not (pipeline and slices):
                continue
            wanted = replace(fixed, shard=shard, pipeline=pipeline or fixed.pipeline)
            wanted = replace(wanted, chunks=1) if shard == "gradients" else wanted
            try:
                tried = price_all(programs, setting, wanted, max_stages)
            except PlanError:
                continue  # what else is fixed leaves nothing to share out
            found += [candidate for candidate in tried if candidate.choice.data > 1]
    return found


def _plan_of(best: Priced, candidates: list[Priced], setting: Setting, precision: str, why: tuple[str, ...]) -> Plan:
    memory, choice = setting.cluster.device.memory_bytes, best.choice
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
        runners_up=tuple(_runner_up(other, memory) for other in runners_up(candidates, best, memory)),
        binding=binding(best, candidates, memory),
        stages=best.stages,
        messages=best.messages,
    )


def layouts(size: int, fixed: Fixed, global_batch: int, max_stages: int) -> list[tuple[int, int]]:
    """Return the (copies, stages) to try: those that use the most ranks, all `size` of them where that is possible.

    There are at most as many copies as samples and as many stages as the model's cuts allow.
    """
    every = [
        (data, pipeline)
        for data in range(1, min(size, global_batch) + 1)
        for pipeline in range(1, min(size // data, max_stages) + 1)
        if fixed.data in (None, data) and fixed.pipeline in (None, pipeline) and data > ((fixed.sync_every or 1) > 1)
        if data % (fixed.shard_ranks or 1) == 0
    ]
    most = max((data * pipeline for data, pipeline in every), default=0)
    return [(data, pipeline) for data, pipeline in every if data * pipeline == most]


def counts(least: int, pipeline: int) -> list[int]:
    """Return the numbers of micro-batches to try for a copy of at least `least` samples.

    All of them up to 8 samples; above, powers of two, multiples of the stages up to eightfold, and one sample each.
    """
    if least <= ALL_COUNTS:
        return list(range(1, least + 1))
    powers = {1 << bit for bit in range(least.bit_length())}
    multiples = {times * pipeline for times in (1, 2, 3, 4, 6, 8)}
    return sorted(count for count in powers | multiples | {least} if count <= least)


def choices(fixed: Fixed, size: int, global_batch: int, max_stages: int) -> Iterator[Choice]:
    """Yield every candidate: copies x ranks, schedules with their chunks, micro-batches."""
    places = layouts(size, fixed, global_batch, max_stages)
    for data, pipeline in places:
        most, least = -(-global_batch // data), global_batch // data
        for schedule, chunks in orders(fixed, pipeline, max_stages, alone=all(p == 1 for _, p in places)):
            for count in _counts(fixed, most, least, pipeline):
                samples = fixed.micro_batch or -(-most // count)
                yield Choice(data, pipeline, schedule, samples, count, chunks, fixed.order, fixed.shard or "none")


def orders(fixed: Fixed, pipeline: int, max_stages: int, *, alone: bool) -> list[tuple[str, int]]:
    """Return the (schedule, chunks) to try on so many ranks.

    With one stage all schedules are the same work, and 1F1B keeps the fewest activations. `backward_first` is left out
    unless asked for: as planned it is 1F1B, action for action. `alone`: there is no layout of several ranks, so a
    schedule that was asked for is carried out on one.
    """
    if fixed.order:
        return [(str(fixed.schedule), fixed.chunks or 1)]
    free = fixed.schedule in (None, SEARCHED)
    names = [name for name in CATALOGUE if name != "backward_first"] if free else [str(fixed.schedule)]
    if pipeline == 1 and free and (fixed.chunks or 1) == 1:
        names = ["one_f_one_b"]
    if pipeline == 1 and fixed.schedule and not free and not alone and CATALOGUE[fixed.schedule].least > 1:
        return []
    return [
        (name, chunks)
        for name in names
        for chunks in ([fixed.chunks] if fixed.chunks else sorted({CATALOGUE[name].least, *CHUNKS}))
        if CATALOGUE[name].allows(chunks) and pipeline * chunks <= max_stages
    ]


def _counts(fixed: Fixed, most: int, least: int, pipeline: int) -> list[int]:
    if fixed.num_micro_batches is not None:
        tried = [fixed.num_micro_batches] if fixed.num_micro_batches <= least else []
    elif fixed.micro_batch is not None:
        tried = [count for count in (-(-most // fixed.micro_batch),) if count <= least]
    else:
        return counts(least, pipeline)
    return [count for count in tried if fixed.micro_batch is None or count * fixed.micro_batch >= most]


def sizes(choice: Choice, global_batch: int) -> set[int]:
    """Return the sizes of all micro-batches of all copies, in samples."""
    each = {
        micro_batches(share, choice.num_micro_batches, choice.micro_batch)
        for share in shares(global_batch, choice.data)
    }
    return {size for copy in each for size in copy}


def price_all(programs: Programs, setting: Setting, fixed: Fixed, max_stages: int) -> list[Priced]:
    """Cut and price the candidates whose micro-batches the model takes, but for those that cannot win.

    The most promising come first. Of each copies x stages at least one is priced, and all that the reasons for the
    winner compare it with.
    Raises PlanError when what is fixed leaves no candidate, and what the model raises when it takes none.
    """
    result: list[Priced] = []
    refused: Exception | None = None
    todo: list[tuple[float, int, Choice, Program]] = []
    for choice in choices(fixed, setting.cluster.size, setting.global_batch, max_stages):
        samples = sizes(choice, setting.global_batch)
        error = programs.refused(samples)
        refused = refused or error
        if error is None:
            program = programs.at(max(samples))
            todo.append((least_seconds(program, choice, setting), len(todo), choice, program))
    memory, fastest = setting.cluster.device.memory_bytes, math.inf
    layouts_seen: set[tuple[int, int]] = set()
    for least, _, choice, program in sorted(todo):
        layout = (choice.data, choice.pipeline)
        if layout in layouts_seen and least > fastest * (1 + NEARLY):
            continue  # it cannot win, wherever it is cut
        layouts_seen.add(layout)
        result.append(cut_and_price(program, choice, setting, fixed.cuts))
        if result[-1].peak <= memory:
            fastest = min(fastest, result[-1].seconds)
    best = choose(result, memory)
    if best is not None:
        known = {candidate.choice for candidate in result}
        compared = [entry for entry in todo if entry[2] in _compared(best.choice, [entry[2] for entry in todo]) - known]
        result += [cut_and_price(program, choice, setting, fixed.cuts) for _, _, choice, program in compared]
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


def _compared(best: Choice, every: list[Choice]) -> set[Choice]:
    """Return what the best is compared with: one step fewer and more micro-batches, and plain schedules of its kind."""
    own = sorted((c for c in every if c.family == best.family), key=lambda c: c.num_micro_batches)
    at = own.index(best)
    same = [
        c
        for c in every
        if (c.data, c.pipeline, c.num_micro_batches) == (best.data, best.pipeline, best.num_micro_batches)
    ]
    return {*own[max(at - 1, 0) : at + 2], *(c for c in same if c.schedule in PLAIN)}


def choose(candidates: list[Priced], memory: int) -> Priced | None:
    """Return the fastest that fits; within 1 %, that of fewest stages, largest micro-batches, least memory."""
    fitting = [candidate for candidate in candidates if candidate.peak <= memory]
    if not fitting:
        return None
    limit = min(candidate.seconds for candidate in fitting) * (1 + NEARLY)
    near = [candidate for candidate in fitting if candidate.seconds <= limit]
    return min(near, key=lambda c: (c.choice.num_stages, c.choice.pipeline, -c.choice.micro_batch, c.peak, c.seconds))


def runners_up(candidates: list[Priced], best: Priced, memory: int) -> list[Priced]:
    """Return the best of every other family (copies, stages, schedule): those that fit by time, then the leanest."""
    families: dict[Family, list[Priced]] = {}
    for candidate in candidates:
        families.setdefault(candidate.choice.family, []).append(candidate)
    families.pop(best.choice.family, None)
    found = [choose(family, memory) or min(family, key=lambda c: c.peak) for family in families.values()]
    return sorted(found, key=lambda c: (c.peak > memory, c.seconds))


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
