"""Keras: what torch does not see of a Keras 3 model on its torch backend: its layers, and who else has its weights.

A Keras model is a torch module whose layers are not its submodules; its parameters are registered at the top, and each
layer finds them through variables of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def layer_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of Keras models, and of layers made of others, with their paths; nothing for other models."""
    for path, module in model.named_modules():
        yield from _below(path, module)


def _below(path: str, layer: Any) -> Iterator[tuple[str, nn.Module]]:
    flatten = getattr(layer, "_flatten_layers", None)
    for inner in flatten(include_self=False, recursive=False) if callable(flatten) else ():
        name = f"{path}.{inner.name}" if path else inner.name
        yield name, inner
        yield from _below(name, inner)


def variables(model: nn.Module) -> Iterator[Any]:
    """Yield the variables of Keras models; each has a parameter as its `_value`."""
    for module in model.modules():
        if hasattr(module, "_flatten_layers"):
            yield from module.variables  # type: ignore[misc]
