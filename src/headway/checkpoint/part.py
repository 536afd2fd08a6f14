"""Part: one safetensors file of a checkpoint; tensors are read one at a time, and checked against their CRC-32."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headway.checkpoint.index import Entry, Index
from headway.errors import CheckpointError

# What safetensors has a name for in every version that Headway takes.
DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
    | {torch.uint16, torch.uint32, torch.uint64}
)


def check_writable(what: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError, naming `what`, when a tensor has no plain content that a file could hold."""
    if hasattr(tensor, "full_tensor"):
        fact = f"{what} is sharded over several ranks (DTensor)"
    elif tensor.layout is not torch.strided:
        fact = f"{what} is {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.dtype not in DTYPES:
        fact = f"{what} is of {dtype_name(tensor)}"
    elif tensor.is_meta:
        fact = f"{what} has no values: it is on the meta device"
    else:
        return
    raise CheckpointError(f"{fact}, which a checkpoint cannot hold", remedy="a dense tensor with plain values")


def write_part(directory: Path, part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Write tensors to a new file of a checkpoint, down to the disk, and return an entry for each."""
    content: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        content[key] = plain.clone() if storage in storages else plain  # the format knows no shared memory
        storages.add(storage)
    path = directory / part
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {key: Entry(dtype_name(t), tuple(t.shape), part, checksum(t)) for key, t in content.items()}


def dtype_name(tensor: torch.Tensor) -> str:
    """Name a tensor's dtype, "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a dense tensor on the CPU."""
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    content = flat.view(torch.uint8)
    return zlib.crc32(content.numpy().data) if content.numel() else 0


class Reader:
    """Reads tensors of a checkpoint by key; each file is mapped once, and only what is asked for is read."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory = directory
        self.index = index
        self._files: dict[str, Any] = {}

    def check(self, keys: Iterable[str]) -> None:
        """Raise CheckpointError when a file with one of these tensors cannot be read or holds something else."""
        for key in keys:
            entry = self.index.tensors[key]
            try:
                found = self._file(entry.part).get_slice(key)
                shape = tuple(found.get_shape())
            except SafetensorError as error:
                raise self._damaged(entry, str(error)) from error
            if shape != entry.shape:
                raise self._damaged(entry, f"{key} is {list(shape)} there and {list(entry.shape)} in the index")

    def read(self, key: str) -> torch.Tensor:
        """Return a tensor in memory of its own, on the CPU."""
        entry = self.index.tensors[key]
        try:
            tensor = self._file(entry.part).get_tensor(key).clone()  # the file's own memory must not outlive the file
        except SafetensorError as error:
            raise self._damaged(entry, str(error)) from error
        if checksum(tensor) != entry.crc:
            raise self._damaged(entry, f"{key} is not what was written (CRC-32)")
        return tensor

    def _file(self, part: str) -> Any:
        if part not in self._files:
            self._files[part] = safe_open(self.directory / part, framework="pt")
        return self._files[part]

    def _damaged(self, entry: Entry, detail: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint is damaged: {detail}",
            place=str(self.directory / entry.part),
            remedy="take an earlier checkpoint, or copy this one again",
        )
