"""Backward: refuses what is forward_backward's to do: gradients of parameters, and their scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import HeadwayError
from headway.graph.where import user_line


def names_of(model: Any) -> dict[int, str]:
    """Name a model's parameters, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def refuse_backward(roots: Sequence[Any], inputs: Sequence[Any], names: Mapping[int, str]) -> None:
    """Raise HeadwayError if a backward from `roots` would add to the gradient of a parameter, named by its id.

    `inputs` are the only tensors whose gradients are added to; when there are none, all leaves that are found.
    """
    found = next((names[id(tensor)] for tensor in inputs or _leaves(roots) if id(tensor) in names), None)
    if found is not None:
        raise HeadwayError(
            f"the loss function calls backward, which adds to the gradient of {found}, as forward_backward will",
            place=user_line(),
            remedy="return the loss without backward; a gradient that is part of it: torch.autograd.grad(...), or "
            "backward(inputs=[...])",
        )


def refuse_number() -> None:
    """Raise HeadwayError for a backward that has nowhere to go, as from what `forward_backward` returns."""
    raise HeadwayError(
        "backward is called on a number that needs no gradient, as the loss that forward_backward returns",
        place=user_line(),
        remedy="leave it out: forward_backward(batch) has done it; weigh or divide a loss in the loss function. "
        "A GradScaler is not needed in bfloat16",
    )


def refuse_scale() -> None:
    """Raise HeadwayError: ranks that hold different parameters would not agree which steps a scaler leaves out."""
    raise HeadwayError(
        "a loss cannot be scaled by a GradScaler: each rank would see only whether its own gradients overflow",
        place=user_line(),
        remedy="torch.autocast(device, dtype=torch.bfloat16) in the loss function, whose range needs no scale",
    )


def _leaves(roots: Sequence[Any]) -> list[Any]:
    """List the tensors whose gradients a backward adds to, those inside a checkpointed region aside."""
    nodes = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    found, seen = [root for root, node in zip(roots, nodes, strict=True) if node is None], {None, *nodes}
    while nodes:
        node = nodes.pop()
        found.append(getattr(node, "variable", None))
        fresh = [nearer for nearer, _ in getattr(node, "next_functions", ()) if nearer not in seen]
        seen.update(fresh)
        nodes.extend(fresh)
    return found
