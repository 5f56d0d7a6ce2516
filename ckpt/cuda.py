"""Copies from GPUs into staging memory, while the program's kernels go on.

All copies run on one stream of our own for each device. It waits for what the program had launched on its current
stream when the save began, and before an optimizer launches anything that changes the state, its stream waits for the
copies. So the GPU keeps the order, and no thread of the program waits for the GPU; the background thread does, for our
stream alone, before it reads what has arrived. No call here waits for the whole device.

Staging memory is page-locked once for each segment, when it is made ready: only such memory is copied to without
waiting. Where the driver refuses, copies go through memory of the driver's own, and hold the thread that starts them.

Imports torch, so it is imported only where a tensor on a GPU is at hand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from transom_hpc.ckpt import tensors
from transom_hpc.ckpt.direct import address
from transom_hpc.ckpt.shm import Segment

log = logging.getLogger("transom_hpc.ckpt")

_sides: dict[torch.device, torch.cuda.Stream] = {}
_refused = False
_PORTABLE = 1  # cudaHostRegisterPortable


class Copies:
    """The copies of one save. Made by the thread of the program that saves, on whose current streams the state is.

    Args:
        devices: on which there is something to copy.
        segment: where it goes.
    """

    def __init__(self, devices: Iterable[torch.device], segment: Segment) -> None:
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        for device in set(devices):
            pin(segment, device)
            self._sides[device] = side = _side(device)
            side.wait_event(torch.cuda.current_stream(device).record_event())

    def copy(self, tensor: torch.Tensor, room: np.ndarray[Any, Any]) -> None:
        """Start a copy. Any thread may call it."""
        side = self._sides[tensor.device]
        with torch.cuda.stream(side):
            tensors.copy_out(tensor, room, wait=False)
        tensor.record_stream(side)  # its memory is not given to others before the copy is over

    def hold_program(self) -> None:
        """What the calling thread launches from now on waits, on the GPU, for the copies that were started."""
        for device, side in self._sides.items():
            torch.cuda.current_stream(device).wait_event(side.record_event())

    def wait(self) -> None:
        """Return when all copies that were started have arrived.

        Raises:
            RuntimeError: the GPU failed.
        """
        for side in self._sides.values():
            side.record_event().synchronize()


def _side(device: torch.device) -> torch.cuda.Stream:
    """Our stream on a device: one for all saves, which follow each other."""
    if device not in _sides:
        _sides[device] = torch.cuda.Stream(device)
    return _sides[device]


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for what the calling thread has launched on its current streams, so that other threads may read it."""
    for device in set(devices):
        torch.cuda.current_stream(device).record_event().synchronize()


def pin(segment: Segment, device: torch.device) -> None:
    """Lock a segment's pages, once, for all devices; it is undone before they are given back.

    Args:
        device: one that the program uses. On any other the driver would take memory for a context.
    """
    global _refused
    if segment.undo is not None or _refused or segment.capacity == 0:
        return
    whole = segment.data(0, segment.capacity)
    where = address(whole)
    with torch.cuda.device(device):
        answer = int(torch.cuda.cudart().cudaHostRegister(where, len(whole), _PORTABLE))
        if answer:
            _refused = True
            _forget_error()
            log.warning(
                "%d bytes of staging memory could not be page-locked (CUDA error %d): copies from the GPU are slower, "
                "and the program waits for those of buffers",
                len(whole),
                answer,
            )
            return
    segment.undo = partial(_unpin, where, whole, device)


def _unpin(where: int, whole: memoryview, device: torch.device) -> None:
    del whole  # it kept the memory mapped until now
    try:
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(where)):
                _forget_error()
    except Exception as error:  # the driver has gone already, at the end of the program, and its locks with it
        log.debug("unpinning: %s", error)


def _forget_error() -> None:
    """The runtime hands an error out once more, to whoever launches the next kernel: that must not be the program."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        log.debug("%s", error)
