"""Together: every rank does its share of a save or a load, and an error on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from safetensors import SafetensorError

from headway.collective.world import World
from headway.errors import CheckpointError, HeadwayError

T = TypeVar("T")


class OtherRankError(CheckpointError):
    """Another rank could not do its share; that rank has the first cause."""

    consequence = True


def together(world: World, share: Callable[[], T]) -> list[T]:
    """Do `share` on this rank; return what it came to on every rank, in their order.

    Raises this rank's own error, or OtherRankError with what the first failing rank said. What the operating system or
    safetensors say becomes a CheckpointError.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = share()
    except Exception as caught:
        error = caught
    said = None if error is None else as_refusal(error)
    outcomes = world.gather_objects((value, said and (said.fact, said.place, said.remedy)))
    if error is not None and said is not None:
        if isinstance(error, OSError | SafetensorError):
            raise said from error
        raise error  # as it is: the launcher knows running out of memory by its own kind
    for rank, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            fact, place, remedy = theirs
            raise OtherRankError(fact, place=f"on rank {rank}" + (f": {place}" if place else ""), remedy=remedy)
    return [value for value, _ in outcomes]


def as_refusal(error: Exception) -> HeadwayError:
    """Say an error as a refusal."""
    if isinstance(error, HeadwayError):
        return error
    if isinstance(error, OSError) and error.strerror:
        remedy = (
            "free some space, or save elsewhere" if "space" in error.strerror else "a path that all ranks can reach"
        )
        return CheckpointError(error.strerror, place=str(error.filename or ""), remedy=remedy)
    if isinstance(error, SafetensorError):
        return CheckpointError(str(error))
    return CheckpointError(f"{type(error).__name__}: {error}")
