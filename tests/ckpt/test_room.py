"""Space and inodes are looked at before anything is made; the files that a save may take count as space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import Checkpointer, list_checkpoints, verify
from transom_hpc.ckpt.files import Files


class Full(Files):
    """A file system with so much left."""

    bytes_left: int | None = None
    inodes_left: int | None = None
    allocated = 0

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.bytes_left is None else self.bytes_left

    def free_inodes(self, path: Path) -> int | None:
        return super().free_inodes(path) if self.inodes_left is None else self.inodes_left

    def allocate(self, fd: int, size: int) -> None:
        self.allocated += 1
        super().allocate(fd, size)


STATE = {"x": np.arange(100_000.0), "y": np.arange(90_000.0)}


def test_too_few_inodes(directory: Path) -> None:
    files = Full()
    with Checkpointer(directory, files=files, data_files=2) as ckpt:
        files.inodes_left = 7
        with pytest.raises(SaveError, match=r"room for 7 more files \(inodes\) and the checkpoint takes up to 8"):
            ckpt.save(1, STATE, block=True)
        files.inodes_left = 8
        assert ckpt.save(1, STATE, block=True)


def test_the_files_of_a_deleted_checkpoint_are_room(directory: Path) -> None:
    files = Full()
    with Checkpointer(directory, files=files, keep=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step, STATE, block=True)
        files.bytes_left = 1000
        ckpt._saver.idle()
        before = files.allocated
        assert ckpt.save(3, STATE, block=True)
        ckpt._saver.idle()
        assert ckpt.save(4, STATE, block=True)
        assert files.allocated == before, "nothing had to be reserved"
        ckpt._saver.idle()
        with pytest.raises(SaveError, match="0.00 GB left and the checkpoint takes 0.08 GB"):
            ckpt.save(5, {"x": np.zeros(10_000_000)}, block=True)
        found = list_checkpoints(directory)
        assert [c.step for c in found] == [4]
        assert verify(found[0].path) == []
    assert sorted(path.name for path in directory.iterdir() if path.name.startswith(".trash")) == []
