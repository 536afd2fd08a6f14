"""Everything: all families there are, the given zoo's among them, under one kind of name: "library name"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from tests.zoo.looking import Family

FOLDER = Path(os.environ.get("ZOO", Path(__file__).parents[3] / "shared" / "zoo"))
LIBRARIES = {
    "hf": "transformers", "tv": "torchvision", "smp": "segmentation_models_pytorch", "vp": "vit_pytorch", "pt": "torch",
    "xt": "x_transformers", "oc": "open_clip", "df": "diffusers", "pyg": "torch_geometric", "pcv": "pytorchcv",
}  # fmt: skip
"""The libraries by the beginnings of the given zoo's names."""
PLAIN = (
    "plain plain_loops plain_training research_learning research_views research_sequence research_memory "
    "research_vision research_shapes research_world research_weights"
)
"""Modules with families in torch alone."""


def loss_of(output: Any) -> Any:
    """Find the loss in what a model gives: a scalar, `.loss`, or the mean squares of all that is floating."""
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = sum(t.float().square().mean() for t in tree_leaves(output) if t is not None and t.is_floating_point())
    return loss.mean()


def with_keywords(build: Callable[[], tuple[nn.Module, Any]], find: Callable[[Any], Any]) -> Family:
    """Make a family of one that gives a model and its keyword arguments."""

    def loss(model: nn.Module, batch: Any) -> Any:
        return find(model(**batch))

    def family() -> tuple[nn.Module, Any, Any]:
        model, batch = build()
        return model, loss, batch

    return family


def given() -> dict[str, Family]:
    """Import the given zoo, where it lies beside this repository."""
    if not (FOLDER / "registry.py").exists():
        return {}
    os.environ.setdefault("KERAS_BACKEND", "torch")
    sys.path.insert(0, str(FOLDER))
    zoo = importlib.import_module("registry")
    found = {}
    for name, build in zoo.FAMILIES.items():
        library, _, rest = name.partition("_")
        found[f"{LIBRARIES.get(library, library)} {rest}"] = with_keywords(build, zoo.loss_of)
    return found


def families() -> dict[str, Family]:
    """List all families by name."""
    found = given()
    for module in PLAIN.split():
        found.update({f"torch {k}": f for k, f in importlib.import_module(f"tests.zoo.{module}").FAMILIES.items()})
    if importlib.util.find_spec("transformers") is not None:
        for module in ("hub", "hub_readers", "hub_senses", "hub_pairs", "hub_chats", "hub_series"):
            table = importlib.import_module(f"tests.zoo.{module}").FAMILIES
            found.update({f"transformers {name}": with_keywords(build, loss_of) for name, build in table.items()})
    for module in ("shelves", "shelves_making", "shelves_science", "shelves_others"):
        found.update(importlib.import_module(f"tests.zoo.{module}").FAMILIES)
    return found
