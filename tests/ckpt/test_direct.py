"""Bytes at offsets: aligned or not, with O_DIRECT or without, the file is the same."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_hpc.ckpt.direct import Batch, DirectWriter, Target, address, pieces, room
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.tensors import empty

MEMORY = memoryview(mmap.mmap(-1, 1 << 20))
MEMORY[:] = os.urandom(1 << 20)


class Refusing(Files):
    """A file system that refuses O_DIRECT, when opening or only when writing."""

    def __init__(self, at_open: bool) -> None:
        self._at_open = at_open
        self._fds: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            if self._at_open:
                raise OSError(errno.EINVAL, "refused")
            fd = super().open(path, flags & ~os.O_DIRECT)
            self._fds.add(fd)
            return fd
        return super().open(path, flags)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self._fds:
            raise OSError(errno.EINVAL, "refused")
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        if fd in self._fds:
            raise OSError(errno.EINVAL, "refused")
        return super().pread(fd, into, offset)


HANDS = {"direct": Files, "refused at open": lambda: Refusing(True), "refused at write": lambda: Refusing(False)}


@pytest.mark.parametrize("hand", HANDS)
@settings(max_examples=40, deadline=None)
@given(
    start=st.sampled_from([0, 1, 64, 4096, 8192]),
    length=st.integers(0, 20_000) | st.sampled_from([4096, 8192, 300_000]),
    offset=st.sampled_from([0, 4096, 12288, 5, 4097]),
)
def test_write_and_read(
    tmp_path_factory: pytest.TempPathFactory, hand: str, start: int, length: int, offset: int
) -> None:
    path = tmp_path_factory.mktemp("x") / "file"
    path.write_bytes(bytes(400_000))
    data = MEMORY[start : start + length]
    files = HANDS[hand]()
    ticks: list[int] = []
    batch = Batch("file", "/x", offset, pieces(0, length, lambda b, e: data[b:e]))
    DirectWriter(files).write(path.parent, ["file"], [batch], lambda: ticks.append(1))
    assert path.read_bytes() == bytes(offset) + bytes(data) + bytes(400_000 - offset - length)
    assert len(ticks) == (length > 0)
    back = bytearray(length + 64)
    with Target(files, path, os.O_RDONLY) as target:
        into = memoryview(back)[start % 64 : start % 64 + length]
        assert target.get(into, offset) == length
    assert bytes(into) == bytes(data)


@pytest.mark.parametrize("hand", HANDS)
def test_reading_past_the_end_tells_how_much_there_was(tmp_path: Path, hand: str) -> None:
    (tmp_path / "f").write_bytes(bytes(10_000))
    with Target(HANDS[hand](), tmp_path / "f", os.O_RDONLY) as target:
        assert target.get(memoryview(bytearray(20_000)), 4096) == 5904
        assert target.get(memoryview(mmap.mmap(-1, 20_480)), 4096) == 5904
        assert target.get(memoryview(bytearray(5)), 20_000) == 0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages")
def test_large_memory_asks_for_large_pages() -> None:
    made = room(8 << 20)
    tensor = empty("float32", (3_000_000,))
    for begin in (address(made), tensor.data_ptr()):
        assert "hg" in flags(begin + (4 << 20))
    tensor.fill_(3)
    again = pickle.loads(pickle.dumps(tensor))
    assert torch.equal(again, tensor)
    tensor.resize_(4_000_000)
    assert float(tensor[:3_000_000].min()) == 3
    tensor.share_memory_()
    assert float(tensor[:3_000_000].min()) == 3


def flags(at: int) -> list[str]:
    """What the kernel notes about the memory there."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word:
            begin, end = (int(part, 16) for part in word.split("-"))
            inside = begin <= at < end
        elif inside and word == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing at {at:x}")
