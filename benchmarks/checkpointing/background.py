"""DCP's ways of saving in the background, at the default and at the best settings that it has on a machine without GPU.

What training waits for is the call, and before the optimizer's next step the end of the staging, where DCP stages in
the background.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpointing.contenders import quietly

PROCESS = "DCP async_save, threaded, process"


@dataclass(frozen=True, slots=True)
class Under:
    """A save that has begun.

    Args:
        staged: waits until the state may change.
        over: whether it is on disk.
        done: waits until it is.
    """

    staged: Callable[[], object]
    over: Callable[[], bool]
    done: Callable[[], object]


class Asynchronous:
    """One way of dcp.async_save.

    Args:
        name: for people.
        threads: that write.
        stager: kept from one save to the next, so that its memory is used again; None for the default, which makes
            new memory each time.
        process: whether a process of its own writes, not a thread. Needs a process group.
        alone: whether there is no process group to talk to.
    """

    def __init__(
        self,
        name: str,
        threads: int = 1,
        stager: DefaultStager | None = None,
        process: bool = False,
        alone: bool = True,
    ) -> None:
        self.name = name
        self._threads = threads
        self._stager = stager
        self._process = process
        self._alone = alone

    def begin(self, held: dict[str, Any], path: Path) -> Under:
        """Begin a save, and return as DCP does."""
        more: dict[str, Any] = {"async_stager": self._stager} if self._stager is not None else {}
        if self._process:
            more["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        with quietly():
            writer = FileSystemWriter(path, thread_count=self._threads)
            answer = dcp.async_save(held, storage_writer=writer, no_dist=self._alone and not self._process, **more)
        if hasattr(answer, "staging_completion"):
            upload = answer.upload_completion
            return Under(answer.staging_completion.result, upload.done, upload.result)
        return Under(lambda: None, answer.done, answer.result)

    def close(self) -> None:
        """Give the staging memory back."""
        if self._stager is not None:
            self._stager.close()


def stager(shared: bool, asynchronous: bool) -> DefaultStager:
    """One without pinned memory and streams, which are for GPUs."""
    return DefaultStager(StagingOptions(False, shared, asynchronous, False))


def all_ways(alone: bool = True) -> list[Asynchronous]:
    """From the default to the best; which one is best is measured."""
    return [
        Asynchronous("DCP async_save", alone=alone),
        Asynchronous("DCP async_save, kept memory", 4, stager(False, False), alone=alone),
        Asynchronous("DCP async_save, threaded", 4, stager(False, True), alone=alone),
        Asynchronous(PROCESS, 4, stager(True, True), process=True, alone=alone),
    ]


def join_alone(folder: Path) -> None:
    """A process group of one, which DCP's process wants; and that process, so that its start is not measured.

    Args:
        folder: empty, for a first save.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    before = os.dup(2)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (the process tells everything that it does)
        os.dup2(nowhere.fileno(), 2)
    try:
        Asynchronous(PROCESS, process=True).begin({"first": torch.zeros(1)}, folder).done()
    finally:
        os.dup2(before, 2)
        os.close(before)
