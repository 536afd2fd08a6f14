"""What a user fixed: each value of `fixed=` is used as given, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.planner.explain import count
from headway.planner.refine import SEARCHED
from headway.planner.shard import SHARDS
from headway.planner.wire import FEEDBACK, LOW_RANK, MENUS, PARTS, low_rank
from headway.schedule.action import Schedule
from headway.schedule.catalogue import CATALOGUE, chunks_text
from headway.schedule.exchange import read_rows, write_rows

# Decisions that a plan can state and that cannot be carried out yet, with the only value that can.
_ONLY: Mapping[str, object] = {"tensor": 1, "recompute": "none"}
_NUMBERS = ("data", "pipeline", "chunks", "micro_batch", "num_micro_batches", "sync_every", "shard_ranks")
CODECS = (*PARTS, *MENUS)
REDUCTIONS = ("mean", "sum")
KEYS = (*_NUMBERS, "schedule", "cuts", "precision", "codec", "shard", "reduction", *_ONLY)


@dataclass(frozen=True)
class Fixed:
    """Decisions that the user made; None where the search is free."""

    data: int | None = None
    pipeline: int | None = None
    chunks: int | None = None
    schedule: str | None = None
    order: tuple[str, ...] = ()  # of a schedule that was given itself, not by name
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    cuts: tuple[str, ...] | None = None
    codec: str | None = None  # or one of `MENUS`: what may be chosen from
    sync_every: int | None = None
    shard: str | None = None
    shard_ranks: int | None = None


def read_fixed(
    fixed: Mapping[str, object] | None, *, size: int, global_batch: int, graph: ModelGraph, precision: str
) -> Fixed:
    """Check what a user fixed against `size` ranks, the global batch and the model's allowed cuts.

    Raises PlanError for a name that is no decision, a value out of range, and decisions that contradict each other.
    """
    given = dict(fixed or {})
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        raise _refuse(f"{unknown[0]!r} is no decision of a plan", unknown[0], f"one of {', '.join(sorted(KEYS))}")
    for name, only in (*_ONLY.items(), ("precision", precision)):
        if given.get(name, only) != only:
            raise _refuse(f"{name}={given[name]!r} is not built yet", name, f"{name}={only!r}, or leave it out")
    numbers = {name: _number(name, given[name]) for name in _NUMBERS if name in given}
    schedule, order = _schedule(given.get("schedule"), numbers)
    if given.get("reduction", "mean") not in REDUCTIONS:
        fact = f"losses of micro-batches do not make a {given['reduction']!r}"
        raise _refuse(fact, "reduction", f"one of {', '.join(REDUCTIONS)}")
    codec = given.get("codec")
    if codec is not None and codec not in CODECS and not (isinstance(codec, str) and low_rank(codec)):
        known = (*CODECS, LOW_RANK, f"{LOW_RANK}:RANK")
        raise _refuse(f"there is no codec called {codec!r}", "codec", f"one of {', '.join(known)}")
    cuts = _cuts(given["cuts"], graph) if "cuts" in given else None
    _settle_chunks(numbers, None if order else schedule, cuts)
    named = None if codec is None else str(codec)
    shard = _shard(given.get("shard"), numbers, named)
    result = Fixed(schedule=schedule, order=order, cuts=cuts, codec=named, shard=shard, **numbers)
    _check_ranks(result, size, graph)
    _check_syncs(result, size, given.get("shard", "none"))
    _check_sharers(result)
    _check_samples(result, global_batch)
    return result


def _schedule(value: object, numbers: dict[str, int]) -> tuple[str | None, tuple[str, ...]]:
    """Read a schedule: a name, or a Schedule itself, which settles the numbers of ranks, stages and micro-batches."""
    if not isinstance(value, Schedule):
        if value is not None and value not in CATALOGUE and value != SEARCHED:
            names = ", ".join((*CATALOGUE, SEARCHED))
            raise _refuse(
                f"there is no schedule called {value!r}", "schedule", f"one of {names}, or a headway.Schedule"
            )
        return None if value is None else str(value), ()
    order = write_rows(value)
    read_rows(order, name=value.name)  # refuses what is not complete, or would never finish
    held = {len(value.stages(rank)) for rank in range(value.num_ranks)}
    if len(held) > 1:
        raise _refuse(
            f"ranks of schedule {value.name!r} hold {min(held)} to {max(held)} stages", "schedule", "as many each"
        )
    for name, number in (
        ("pipeline", value.num_ranks), ("chunks", held.pop()), ("num_micro_batches", value.num_micro)
    ):  # fmt: skip
        if numbers.setdefault(name, number) != number:
            fact = f"schedule {value.name!r} is for {name}={number}, not {numbers[name]}"
            raise _refuse(fact, name, f"{name}={number}, or leave it out")
    return value.name, order


def _shard(value: object, numbers: dict[str, int], codec: str | None) -> str | None:
    """Read what copies share out, and what that asks of the stages."""
    if value is None:
        return None
    if value not in SHARDS:
        raise _refuse(f"copies cannot share out {value!r}", "shard", f"one of {', '.join(SHARDS)}")
    shard = str(value)
    stages = numbers.get("pipeline", 1) * numbers.get("chunks", 1)
    if shard == "parameters":
        if stages > 1:
            fact = f'shard="parameters" is for copies of the whole model, and {count(stages, "stage")} are asked for'
            raise _refuse(fact, "shard", 'shard="gradients", or pipeline=1')
        numbers["pipeline"] = numbers["chunks"] = 1
    if shard == "gradients":
        if numbers.setdefault("chunks", 1) > 1:
            fact = f'shard="gradients" is for one stage on each rank, chunks={numbers["chunks"]} asks for more'
            raise _refuse(fact, "shard", 'shard="optimizer", or chunks=1')
    if shard != "none" and codec is not None and codec.partition(":")[0] in FEEDBACK:
        raise _refuse(
            f"codec {codec} keeps what it loses where gradients are summed for all, which sharding does not do",
            "codec",
            'one of fp32, fp16, bf16, int8, or shard="none"',
        )
    return shard


def _settle_chunks(numbers: dict[str, int], schedule: str | None, cuts: tuple[str, ...] | None) -> None:
    """Work out `pipeline` and `chunks` from each other, the schedule and the number of cuts, or refuse them."""
    entry = CATALOGUE.get(schedule) if schedule else None
    if entry is not None and "chunks" not in numbers and entry.least == entry.most:
        numbers["chunks"] = entry.least
    if cuts is not None:
        stages, cut = len(cuts) + 1, count(len(cuts), "cut")
        makes = f"{cut} {'makes' if len(cuts) == 1 else 'make'} {count(stages, 'stage')}"
        if "pipeline" in numbers and "chunks" not in numbers and stages % numbers["pipeline"] == 0:
            numbers["chunks"] = stages // numbers["pipeline"]
        chunks = numbers.setdefault("chunks", 1 if entry is None else entry.least)
        pipeline = numbers.setdefault("pipeline", max(1, stages // chunks))
        if pipeline * chunks != stages:
            given = f"pipeline={pipeline}" + (f" with {chunks} stages on each rank" if chunks > 1 else "")
            raise _refuse(
                f"{makes}, {given} asks for {pipeline * chunks}",
                "cuts",
                f"{pipeline * chunks - 1} cuts, or other numbers",
            )
    if entry is not None and not entry.allows(numbers.get("chunks", entry.least)):
        raise _refuse(
            f"{schedule} has {chunks_text(entry)} on each rank, chunks={numbers['chunks']} asks for "
            f"{numbers['chunks']}",
            "chunks",
            f"with {schedule} leave chunks out; {numbers['chunks']} go with "
            + ", ".join(name for name, other in CATALOGUE.items() if other.allows(numbers["chunks"])),
        )


def _check_ranks(fixed: Fixed, size: int, graph: ModelGraph) -> None:
    data, pipeline = fixed.data or 1, fixed.pipeline or 1
    if data * pipeline > size:
        names = [f"{name}={value}" for name, value in (("data", fixed.data), ("pipeline", fixed.pipeline)) if value]
        there = "there is 1 process" if size == 1 else f"there are {size} processes"
        raise PlanError(
            f"{' and '.join(names)} {'need' if len(names) > 1 else 'needs'} {data * pipeline} processes, {there}",
            place="fixed=",
            remedy=f"start {data * pipeline} processes (headway run -n {data * pipeline} ...), or a smaller value",
        )
    most, chunks = len(graph.cuts) + 1, fixed.chunks or 1
    if pipeline * chunks > most:
        asks = f"pipeline={pipeline}" + (f" with chunks={chunks}" if chunks > 1 else "")
        raise _refuse(
            f"the model can be cut into at most {most} stages, {asks} asks for more",
            "pipeline" if pipeline > 1 else "chunks",
            f"{'pipeline' if chunks == 1 else 'pipeline * chunks'} = {most} or less",
        )


def _check_syncs(fixed: Fixed, size: int, shard: object) -> None:
    every = fixed.sync_every or 1
    if every > 1 and (fixed.data == 1 or size == 1):
        raise _refuse(f"sync_every={every} is for several copies, and there is one", "sync_every", "data=2 or more")
    if every > 1 and shard != "none":
        fact = f"with sync_every={every} each copy trains on its own, so copies cannot share out {shard}"
        raise _refuse(fact, "sync_every", 'shard="none", or sync_every=1')


def _check_sharers(fixed: Fixed) -> None:
    each, data = fixed.shard_ranks, fixed.data
    if each is None:
        return
    if fixed.shard in (None, "none"):
        raise _refuse(f"shard_ranks={each}, but copies share nothing out", "shard_ranks", 'shard="optimizer" as well')
    if each < 2 or data is not None and data % each:
        copies = f"{data} copies" if data else "copies"
        raise _refuse(f"{copies} cannot share out in groups of {each}", "shard_ranks", "2 or more, a divisor of data")


def _check_samples(fixed: Fixed, global_batch: int) -> None:
    data = fixed.data or 1
    if data > global_batch:
        raise _refuse(
            f"{data} copies cannot share {global_batch} samples", "data", f"data={global_batch}, or a larger batch"
        )
    most, least = -(-global_batch // data), global_batch // data
    if fixed.micro_batch is not None and fixed.micro_batch > most:
        raise _refuse(
            f"a micro-batch of {fixed.micro_batch} samples is more than a copy's {most} of the global batch",
            "micro_batch",
            f"micro_batch={most} or less",
        )
    if fixed.num_micro_batches is not None and fixed.num_micro_batches > least:
        raise _refuse(
            f"{least} samples of a copy cannot be cut into {fixed.num_micro_batches} micro-batches",
            "num_micro_batches",
            f"num_micro_batches={least} or less",
        )


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refuse(f"{name}={value!r} is not a whole number from 1 up", name, f"{name}=1")
    return value


def _cuts(value: object, graph: ModelGraph) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise _refuse(f"cuts={value!r} is not a list of names", "cuts", 'cuts=["blocks.3"]')
    some = ", ".join(cut.name for cut in graph.cuts if "#" not in cut.name) or ", ".join(c.name for c in graph.cuts)
    # A module may also be called by a path that begins at the same place: "blocks.0" where "blocks" does.
    begins = {module.path: module.first for module in reversed(graph.modules)}
    places_of = {cut.index: cut.name for cut in graph.cuts}
    names = [str(name if name in graph.cut else places_of.get(begins.get(name, -1), name)) for name in given]
    for name in names:
        if name not in graph.cut:
            raise _refuse(f"the model has no place to cut called {name!r}", "cuts", f"for instance {some[:200]}")
    places = [graph.cut[name].index for name in names]
    if any(later <= earlier for earlier, later in zip(places, places[1:], strict=False)):
        raise _refuse(f"cuts={list(names)} are not in the order of the program", "cuts", f"for instance {some[:200]}")
    return tuple(names)


def _refuse(fact: str, name: str, remedy: str) -> PlanError:
    return PlanError(fact, place=f'fixed={{"{name}": ...}}', remedy=remedy)
