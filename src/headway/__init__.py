"""Headway trains an ordinary PyTorch script on many devices: it decides how, says why, and does it."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headway.errors import BatchError, CheckpointError, HeadwayError, PlanError, RankError, SplitError

if TYPE_CHECKING:
    from headway.checkpoint.load import load
    from headway.checkpoint.save import save
    from headway.cost.cluster import Cluster
    from headway.planner.plan import Plan
    from headway.run.decide import advise, plan
    from headway.run.microbatch import Mean, Shared
    from headway.run.parallel import ParallelModel, parallelize
    from headway.schedule.action import Schedule

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CheckpointError",
    "Cluster",
    "HeadwayError",
    "Mean",
    "ParallelModel",
    "Plan",
    "PlanError",
    "RankError",
    "Schedule",
    "Shared",
    "SplitError",
    "advise",
    "load",
    "parallelize",
    "plan",
    "save",
]

# Resolved on demand: the command line imports this file, and must answer before torch could be imported.
_HOME = MappingProxyType(
    {
        "Cluster": "headway.cost.cluster",
        "Mean": "headway.run.microbatch",
        "ParallelModel": "headway.run.parallel",
        "Plan": "headway.planner.plan",
        "Schedule": "headway.schedule.action",
        "Shared": "headway.run.microbatch",
        "advise": "headway.run.decide",
        "load": "headway.checkpoint.load",
        "parallelize": "headway.run.parallel",
        "plan": "headway.run.decide",
        "save": "headway.checkpoint.save",
    }
)


def __getattr__(name: str) -> Any:
    """Import a name of the face when it is first asked for."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the face, imported or not."""
    return sorted({*globals(), *__all__})
