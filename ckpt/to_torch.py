"""torch's own file, for torch.load(weights_only=True, mmap=True): torch writes it without data, which follows here.

torch.serialization.skip_data leaves room for the bytes of tensors that exist in name only, which is how torch itself
prepares files that are too large for the memory. What it can't know then are the zip file's checksums; they are put in
when the bytes have passed by.
"""

from __future__ import annotations

import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from transom_hpc.base.errors import SaveError, UsageError
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.contents import stream
from transom_hpc.ckpt.export import put
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.gathered import Slot

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL_SIGNATURE = b"PK\x01\x02"
_CENTRAL_CRC = 16
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08


class TorchFormat:
    """Nested containers as they are; what is tied stays tied.

    Args:
        state: see gathered.
    """

    def __init__(self, state: Any) -> None:
        if not hasattr(torch.serialization, "skip_data"):
            raise UsageError(f"torch {torch.__version__} can't write a file without its data; it takes 2.6 or later")
        self.tied: dict[str, str] = {}  # nothing has to be left out for that
        self.left_out: list[tuple[str, str]] = []
        self.slots: list[Slot] = []
        self._made: dict[int, Any] = {}
        self._state = state
        self._collect(state)

    def _collect(self, value: Any) -> None:
        """The arrays, in the order in which they are pickled."""
        if isinstance(value, Slot) and id(value) not in self._made:
            self._made[id(value)] = None
            self.slots.append(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            self._collect(item)

    def _with_tensors(self, value: Any) -> Any:
        if isinstance(value, Slot):
            if self._made[id(value)] is None:
                self._made[id(value)] = torch.empty(value.array.shape, dtype=getattr(torch, value.dtype))
            return self._made[id(value)]
        if isinstance(value, dict):
            return type(value)((key, self._with_tensors(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return type(value)(self._with_tensors(item) for item in value)
        return set(value) if isinstance(value, frozenset) else value  # torch.load knows sets, and no frozen ones

    def write(self, checkpoint: Checkpoint, path: Path, progress: Callable[[int], None] | None) -> None:
        """See Format."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("ignore")  # of types that torch calls experimental
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(self._with_tensors(self._state), path)
        self._fill(checkpoint, path, progress)

    def _fill(self, checkpoint: Checkpoint, path: Path, progress: Callable[[int], None] | None) -> None:
        files = Files()
        with zipfile.ZipFile(path) as archive:
            records = {info.filename.partition("/data/")[2]: info for info in archive.infolist()}
            central = archive.start_dir
        places = _central_places(path, central)
        fd = files.open(path, os.O_RDWR)
        try:
            for number, slot in enumerate(self.slots):
                info = records.get(str(number))
                if info is None or info.file_size != slot.array.nbytes or info.compress_type:
                    raise SaveError(f"torch {torch.__version__} lays its files out in a way that is not known here")
                if not info.file_size:
                    continue
                at = _begin(fd, info, files)
                crc = 0
                for piece in stream(checkpoint, slot.array, progress):
                    crc = zlib.crc32(piece, crc)
                    at = put(fd, piece, at, files)
                _set_crc(fd, info, at, places[info.filename], crc, files)
            files.fsync(fd)
        finally:
            files.close(fd)


def _read(fd: int, nbytes: int, offset: int, files: Files) -> bytes:
    room = bytearray(nbytes)
    got = files.pread(fd, memoryview(room), offset)
    return bytes(room[:got])


def _begin(fd: int, info: zipfile.ZipInfo, files: Files) -> int:
    """Where a record's bytes begin."""
    head = _LOCAL.unpack(_read(fd, _LOCAL.size, info.header_offset, files))
    return info.header_offset + _LOCAL.size + int(head[-2]) + int(head[-1])


def _set_crc(fd: int, info: zipfile.ZipInfo, end: int, central: int, crc: int, files: Files) -> None:
    """Put a record's checksum where readers look for it: behind its bytes and in the directory."""
    value = memoryview(crc.to_bytes(4, "little"))
    if info.flag_bits & _HAS_DESCRIPTOR:
        skipped = 4 if _read(fd, 4, end, files) == _DESCRIPTOR_SIGNATURE else 0
        put(fd, value, end + skipped, files)
    else:
        put(fd, value, info.header_offset + 14, files)
    put(fd, value, central + _CENTRAL_CRC, files)


def _central_places(path: Path, start: int) -> dict[str, int]:
    """Where in the file the directory's entry of each record is."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    found: dict[str, int] = {}
    at = 0
    while data[at : at + 4] == _CENTRAL_SIGNATURE:
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        found[data[at + 46 : at + 46 + name].decode()] = start + at
        at += 46 + name + extra + comment
    return found
