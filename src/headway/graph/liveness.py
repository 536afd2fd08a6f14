"""Liveness: what is still needed after each call, and so where a stage may begin and what crosses there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from headway.graph.model import Call, Cut, ModuleCall, Position, Ref, Value, Weight, position_text


def last_uses(calls: Sequence[Call], values: Sequence[Value], results: Sequence[int]) -> list[int]:
    """Give for each value the index of the last call that takes it; len(calls) for the program's results; -1: none."""
    last = [-1] * len(values)
    for call in calls:
        for value in call.inputs:
            last[value] = call.index
    for number in results:
        last[number] = len(calls)
    return last


def derived_since(calls: Sequence[Call], values: Sequence[Value]) -> list[int | None]:
    """Give for each value the first call after which its content depends on parameters; None: never.

    An in-place write that depends on parameters makes every alias of the storage depend on them.
    """
    first_write: dict[int, int] = {}
    for call in calls:
        if call.derived:
            for written in call.writes:
                first_write.setdefault(values[written].storage, call.index)
    since: list[int | None] = []
    for value in values:
        if value.derived:
            since.append(-1 if value.producer is None else value.producer)
        else:
            write = first_write.get(value.storage)
            since.append(None if write is None else max(write, -1 if value.producer is None else value.producer))
    return since


def storage_writes(calls: Sequence[Call], values: Sequence[Value]) -> dict[int, list[int]]:
    """Give for each storage the calls that change it in place, in order."""
    writes: dict[int, list[int]] = defaultdict(list)
    for call in calls:
        for storage in {values[v].storage for v in call.writes}:
            writes[storage].append(call.index)
    return writes


def allowed_cuts(
    calls: Sequence[Call],
    values: Sequence[Value],
    modules: Sequence[ModuleCall],
    results: Sequence[int],
    reshaped: Mapping[int, int],
    locked: Mapping[int, str] | None = None,
    unsendable: Set[int] = frozenset(),
) -> tuple[tuple[Cut, ...], tuple[tuple[int, str], ...]]:
    """Find the places where a stage may begin, with what crosses there, and say why the others are refused.

    A value crosses before call c when its content depends on parameters before c and a call from c on takes it.
    Refused: a value whose maker was not seen, one whose shape was changed in place, and two aliases of one storage
    that both cross and are written later (each stage would have its own copy); also every place in `locked`, and
    what lies inside a checkpointed region, a module that changes its buffers, or what autograd.grad goes back over.
    """
    last, since = last_uses(calls, values, results), derived_since(calls, values)
    writes = storage_writes(calls, values)
    names = _cut_names(calls, modules)
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for value in values:
        start = since[value.id]
        if start is not None and last[value.id] > start:
            begins[start + 1].append(value.id)  # crosses cuts start + 1 .. last use
            ends[last[value.id] + 1].append(value.id)
    whole = {**_updating(calls, modules), **_differentiated(calls), **(locked or {})}
    live: dict[int, None] = dict.fromkeys(begins.get(0, ()))
    cuts: list[Cut] = []
    refused: list[tuple[int, str]] = []
    seen_derived = False
    for call in calls:
        for ended in ends.get(call.index, ()):
            live.pop(ended, None)
        live.update(dict.fromkeys(begins.get(call.index, ()) if call.index else ()))
        if not call.derived:
            continue
        if not seen_derived:  # the first stage begins at the start of the program
            seen_derived = True
            continue
        reason = whole.get(call.index) or _refusal(call.index, live, values, writes, reshaped, unsendable)
        if reason:
            refused.append((call.index, reason))
        else:
            boundary = tuple(live)
            size = sum(values[v].bytes for v in boundary)
            name, position = names[call.index]
            cuts.append(Cut(name, call.index, position, boundary, size))
    return tuple(cuts), tuple(refused)


def _updating(calls: Sequence[Call], modules: Sequence[ModuleCall]) -> dict[int, str]:
    """Name the calls inside a module without children that changes buffers, and inside a checkpointed region."""
    parents = {module.position[:-2] for module in modules}
    found: dict[int, str] = {}
    for module in modules:
        inside = calls[module.first : module.last]
        if module.kind == "checkpoint":
            reason = "backward computes a checkpointed region again, so it stays on one stage"
        elif module.position not in parents and any(call.written_buffers for call in inside):
            reason = f"{module.path} changes its buffers here, and its state stays on one stage"
        else:
            continue
        first = next((call.index for call in inside if call.derived), module.last)
        for call in inside:
            if call.index > first:
                found[call.index] = reason
    uses: dict[str, list[int]] = {name: [] for call in calls for name in call.written_buffers}
    for call in calls:
        for name in {*call.buffers, *call.written_buffers, *call.parameters} & uses.keys():
            uses[name].append(call.index)
    for name, indices in uses.items():
        for index in range(indices[0] + 1, indices[-1] + 1):
            found.setdefault(index, f"{name} changes, and is used before and after: its state stays on one stage")
    return found


def _differentiated(calls: Sequence[Call]) -> dict[int, str]:
    """Name the calls between the use of a tensor and torch.autograd.grad with respect to it."""
    found: dict[int, str] = {}
    for call in calls:
        if call.function != "torch.autograd.grad" or call.arguments is None:
            continue
        args, kwargs = call.arguments
        given = args[1] if len(args) > 1 else kwargs.get("inputs")
        leaves = given if isinstance(given, tuple | list) else (given,)
        sources = {leaf.value for leaf in leaves if isinstance(leaf, Ref)}
        weights = {leaf.name for leaf in leaves if isinstance(leaf, Weight)}
        first = _first_user(calls[: call.index], sources, weights)
        for index in range((call.index if first is None else first) + 1, call.index + 1):
            found[index] = "torch.autograd.grad goes back over these calls, so they stay on one stage"
    return found


def _first_user(calls: Sequence[Call], sources: set[int], weights: set[str]) -> int | None:
    """Find the first call that takes one of the sources, or what other calls made of them, with a parameter."""
    for call in calls:
        if not (sources.isdisjoint(call.inputs) and weights.isdisjoint(call.parameters)):
            if call.derived:
                return call.index
            sources.update(call.outputs)
            sources.update(call.writes)
    return None


def _refusal(
    index: int, live: Mapping[int, None], values: Sequence[Value], writes: Mapping[int, list[int]],
    reshaped: Mapping[int, int], unsendable: Set[int],
) -> str | None:  # fmt: skip
    storages: dict[int, int] = {}
    for number in live:
        value = values[number]
        if value.producer is None and value.derived:
            return "a value that depends on parameters was made where no torch call was seen"
        if number in unsendable:
            return "a sparse, nested or quantized value would cross, which messages do not carry"
        if reshaped.get(number, index) < index:
            return "a value that crosses had its shape changed in place"
        other = storages.setdefault(value.storage, number)
        if other != number and any(write >= index for write in writes.get(value.storage, ())):
            return "two views of one tensor cross, and one is written in place later"
    return None


def guarded_modules(
    modules: Sequence[ModuleCall], draws: Sequence[bool], calls: Sequence[Call], values: Sequence[Value]
) -> list[ModuleCall]:
    """Mark the module calls that must be followed call by call.

    Those are the ones that read values, draw random numbers (`draws`: Python's or numpy's), or make a value that is
    used outside without being part of the module's result (kept in an attribute, a list, a cache).
    """
    used_at: dict[int, list[int]] = defaultdict(list)
    for call in calls:
        for value in call.inputs:
            used_at[value].append(call.index)
    result = []
    for module, on_host in zip(modules, draws, strict=True):
        guarded = on_host
        for call in calls[module.first : module.last]:
            guarded = guarded or call.random or call.reads_value
            for value in call.outputs:
                escapes = any(not module.first <= use < module.last for use in used_at[value])
                guarded = guarded or (escapes and value not in module.results)
            if guarded:
                break
        result.append(replace(module, guarded=guarded))
    return result


def _cut_names(calls: Sequence[Call], modules: Sequence[ModuleCall]) -> dict[int, tuple[str, Position]]:
    """Name each call's place: the outermost module that begins with it, else its module and event number.

    A module begins with its first call that depends on parameters; then the stage begins with the module's call.
    """
    by_position: dict[Position, ModuleCall] = {m.position: m for m in modules}
    first_derived: dict[Position, int] = {}
    for call in calls:
        if call.derived:
            for depth in range(2, len(call.position), 2):
                first_derived.setdefault(call.position[:depth], call.index)
    names: dict[int, tuple[str, Position]] = {}
    taken: set[str] = set()
    for call in calls:
        name, position = "", call.position
        for depth in range(2, len(call.position), 2):
            module = by_position.get(call.position[:depth])
            if module is None or first_derived.get(module.position) != call.index or not module.path:
                continue
            position = min(position, module.position, key=len)
            if module.kind != "checkpoint":  # a checkpointed region has the name of the module in it
                name = module.path + (f"*{module.occurrence}" if module.occurrence else "")
                break
        if not name:
            module = by_position.get(call.position[:-2])
            place = "loss" if module is None else module.path or "model"
            again = f"*{module.occurrence}" if module and module.occurrence else ""
            landmark, count = call.position[-2:]
            name = f"{place}{again}#{landmark}.{count}" if landmark else f"{place}{again}#{count}"
        if name in taken:
            name = f"{name}@{position_text(call.position)}"
        taken.add(name)
        names[call.index] = (name, position)
    return names
