"""The safetensors format, written in one pass: eight bytes with the header's length, the header (JSON), the bytes.

https://github.com/huggingface/safetensors#format. The library that reads it here (see arriving) writes files only from
arrays that are in memory, all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import dtypes, names
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.contents import stream
from transom_hpc.ckpt.export import flat, put
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.gathered import Slot

TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Types that safetensors' readers agree on."""

_HEADER_BYTES = 100_000_000
"""Longest header that readers take."""


class SafetensorsFormat:
    """A flat dict of tensors; the keys of nested ones are joined by '.', as in a state_dict.

    What is tied is kept once, under its first name, and the header's metadata has the other names, as
    safetensors.torch.save_model does it.

    Args:
        state: see gathered.
        step: for the metadata.
        name: of the only tensor, where the state is no container.
    """

    def __init__(self, state: Any, step: int, name: str) -> None:
        self.tied: dict[str, str] = {}
        self.left_out: list[tuple[str, str]] = []
        self._step = step
        self._named: dict[str, Slot] = {}
        first: dict[int, str] = {}
        for parts, value in flat(state):
            key = ".".join(parts) or name
            if not isinstance(value, Slot):
                self.left_out.append((names.place(parts), "no tensor"))
            elif value.dtype not in TYPES:
                self.left_out.append((names.place(parts), f"safetensors has no element type {value.dtype}"))
            elif key in self._named or key in self.tied or key == "__metadata__":
                raise UsageError(f"two places of the state have the name {key} in the file; use --only, or a .pt file")
            elif id(value) in first:
                self.tied[key] = first[id(value)]
            else:
                first[id(value)] = key
                self._named[key] = value
        # The widest elements first, so that all begin at multiples of their width.
        self._named = dict(
            sorted(self._named.items(), key=lambda item: -dtypes.numpy_dtype(item[1].array.dtype).itemsize)
        )
        self.slots = list(self._named.values())

    def write(self, checkpoint: Checkpoint, path: Path, progress: Callable[[int], None] | None) -> None:
        """See Format."""
        files = Files()
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(self._step), **self.tied}}
        at = 0
        for key, slot in self._named.items():
            end = at + slot.array.nbytes
            header[key] = {"dtype": TYPES[slot.dtype], "shape": list(slot.array.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        if len(text) > _HEADER_BYTES:
            raise UsageError(f"a header of {len(text)} bytes is more than safetensors' readers take; use a .pt file")
        fd = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            files.allocate(fd, 8 + len(text) + at)
            at = put(fd, memoryview(len(text).to_bytes(8, "little") + text), 0, files)
            for slot in self.slots:
                for piece in stream(checkpoint, slot.array, progress):
                    at = put(fd, piece, at, files)
            files.fsync(fd)
        finally:
            files.close(fd)
