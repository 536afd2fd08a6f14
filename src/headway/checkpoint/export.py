"""Export: the model's state alone, as one safetensors file that `load_state_dict` takes, without Headway."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from headway.checkpoint.index import MODEL, read_index
from headway.checkpoint.part import Reader
from headway.errors import CheckpointError
from headway.units import format_bytes


def export(directory: Path, target: Path) -> str:
    """Write the model of a checkpoint under its original names, tied tensors once a name; say what was written.

    The model is in memory once. Raises CheckpointError for a damaged checkpoint, or when the file cannot be written.
    """
    if target.suffix != ".safetensors":
        raise CheckpointError(
            "the weights are written as safetensors", place=str(target), remedy=f"name it {target.stem}.safetensors"
        )
    index = read_index(directory)
    reader = Reader(directory, index)
    read = {first: reader.read(MODEL + first) for first in dict.fromkeys(index.names.values())}
    tensors = {name: read[first] if name == first else read[first].clone() for name, first in index.names.items()}
    draft = target.with_name(target.name + ".part")
    try:
        save_file(tensors, draft, metadata={"format": "pt"})
        os.replace(draft, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(error), place=str(target)) from error
    finally:
        draft.unlink(missing_ok=True)
    return f"{target}: {len(tensors)} tensors, {format_bytes(target.stat().st_size)}"
