"""Ownership: which copy of the model keeps the optimizer's states of a parameter, when they are shared out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def share_out(
    sizes: Mapping[str, int],
    holders: Mapping[str, Sequence[int]],
    copies: int,
    placement: Sequence[int] | None = None,
) -> dict[str, int]:
    """Give each parameter an owner among `copies`, by name: whole tensors, so that the owners hold about the same.

    `sizes` are bytes, `holders` the stages that hold a parameter, `placement[stage]` the pipeline rank of a stage (by
    default a rank each). The largest first, each to the copy that has least so far on that rank; ties by name. A
    parameter that several stages hold has one owner for all of them. The fullest owner has at most 4/3 - 1/(3 copies)
    of the least possible, which is at least the largest tensor (Graham 1969, "Bounds on Multiprocessing Timing
    Anomalies").
    """
    loads: dict[int, list[int]] = {}
    owners: dict[str, int] = {}
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    tied = [name for name in order if len(holders[name]) > 1]
    for name in (*tied, *(name for name in order if len(holders[name]) == 1)):
        ranks = {placement[stage] if placement else stage for stage in holders[name]}
        here = [loads.setdefault(rank, [0] * copies) for rank in sorted(ranks)]
        owner = min(range(copies), key=lambda copy: (sum(load[copy] for load in here), copy))
        for load in here:
            load[owner] += sizes[name]
        owners[name] = owner
    return owners


def in_flight_bytes(trainable: int) -> int:
    """Return how many bytes of gradients may be on their way to owners, before backward waits for the wire.

    An eighth of all, so that sharing out saves what it says; from 8 to 64 MiB, so that the wire has work.
    """
    return min(trainable, max(8 << 20, min(64 << 20, trainable // 8)))
