"""Fingerprint: which model, batch and machine a plan was made for, and what differs when it meets another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.cost.cluster import Cluster
from headway.errors import PlanError
from headway.graph.model import ModelGraph, ParameterInfo

REMEDY = "make the plan again with headway.plan(...), or load the plan file that belongs to this script"


@dataclass(frozen=True)
class Fingerprint:
    """Summarise what a plan was made for, readable enough to name a difference.

    `parameters` (buffers included) and `calls` are digests; `weights` is one of names, shapes and dtypes of parameters
    alone, `trained` of the names of those that require gradients ("" in plan files of before); `batch` holds a text
    for each leaf of the batch, "int64 [*, 128]", where * is the samples; `cluster` is hosts x devices x kind, without
    memory (what is free differs from run to run).
    """

    num_parameters: int
    num_tensors: int
    parameters: str
    calls: str
    batch: tuple[str, ...]
    cluster: str
    weights: str = ""
    trained: str = ""

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits over everything."""
        return _digest(str(value) for value in asdict(self).values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for TOML."""
        return {**asdict(self), "batch": list(self.batch)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Read what `to_dict` returned."""
        return cls(**{**values, "batch": tuple(values["batch"])})


def fingerprint(graph: ModelGraph, cluster: Cluster) -> Fingerprint:
    """Return the fingerprint of a recorded model on a cluster."""
    entries = [(p.name, p.shape, p.dtype, p.trainable) for p in graph.parameters]
    return Fingerprint(
        num_parameters=graph.num_parameters,
        num_tensors=len(entries),
        parameters=_digest(map(str, entries)),
        calls=_digest(f"{call.position} {call.module} {call.function}" for call in graph.calls),
        batch=batch_leaves(graph),
        cluster=cluster_shape(cluster),
        **digests(graph.parameters),
    )


def digests(parameters: Iterable[ParameterInfo]) -> dict[str, str]:
    """Return the digests `weights` and `trained` of a model's parameters."""
    own = [p for p in parameters if not p.is_buffer]
    return {
        "weights": _digest(f"{p.name} {list(p.shape)} {p.dtype}" for p in own),
        "trained": _digest(p.name for p in own if p.trainable),
    }


def batch_leaves(graph: ModelGraph) -> tuple[str, ...]:
    """Return dtype and shape of each tensor of the batch, * for the samples."""
    return tuple(leaf_text(value.dtype, value.shape, graph.samples) for value in graph.values if value.given)


def leaf_text(dtype: str, shape: Iterable[int], samples: int) -> str:
    """Write a leaf as "int64 [*, 128]"; * stands where dim 0 is the samples."""
    sizes = [str(size) for size in shape]
    if sizes and sizes[0] == str(samples):
        sizes[0] = "*"
    return f"{dtype} [{', '.join(sizes)}]"


def cluster_shape(cluster: Cluster) -> str:
    """Write hosts x devices x kind."""
    return f"{cluster.hosts}x{cluster.devices_per_host}x{cluster.device.kind}"


def compare(planned: Fingerprint, met: Fingerprint) -> None:
    """Raise PlanError that says what differs between what a plan was made for and what it meets."""
    if not planned.weights:
        met = replace(met, weights="", trained="")
    if planned == met:
        return
    if planned.parameters != met.parameters:
        raise PlanError(
            f"the plan is for another model: {_model_difference(planned, met)}",
            place="parameters of the model",
            remedy=REMEDY,
        )
    if planned.batch != met.batch:
        raise PlanError(
            f"the plan is for another batch: it was made for {', '.join(planned.batch) or 'no tensors'}, "
            f"this batch has {', '.join(met.batch) or 'no tensors'}",
            place="leaves of the batch (* is the samples)",
            remedy=REMEDY,
        )
    if planned.calls != met.calls:
        raise PlanError(
            "the plan is for another program: the parameters are the same, the calls of loss(model, batch) are not",
            place="forward of the model or the loss",
            remedy=REMEDY,
        )
    raise PlanError(
        f"the plan is for another machine: it was made for {planned.cluster}, this is {met.cluster}",
        place="cluster",
        remedy=REMEDY,
    )


def _model_difference(planned: Fingerprint, met: Fingerprint) -> str:
    sizes = (
        f"it was made for {planned.num_parameters:,} parameters in {planned.num_tensors} tensors, "
        f"this one has {met.num_parameters:,} in {met.num_tensors}"
    )
    if (planned.num_parameters, planned.num_tensors) != (met.num_parameters, met.num_tensors):
        return sizes
    return f"{planned.num_parameters:,} parameters in both, but their names, shapes, dtypes or trainability differ"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
