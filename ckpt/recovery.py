"""One restore on one rank, from what is there to a filled state: candidates, agreement, and what is put aside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import CorruptCheckpoint
from transom_hpc.ckpt import catalog, direct, housekeeping
from transom_hpc.ckpt.agree import Outcome, Proposal, agree, proposals
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import Meeting
from transom_hpc.ckpt.restore import Candidate, Found
from transom_hpc.ckpt.slots import Left, Slots

log = logging.getLogger("transom_hpc.ckpt")


class Recovery:
    """A restore under way.

    Args:
        directory: that holds the checkpoints.
        state: the live state.
        rank: this rank.
        world_size: how many there are.
        strict: whether everything must fit.
        unpickle: see Checkpointer.
    """

    def __init__(
        self,
        directory: Path,
        state: Any,
        rank: int,
        world_size: int,
        strict: bool,
        unpickle: bool,
        slots: Slots,
        fence: Fence,
        files: Files,
    ) -> None:
        self._directory = directory
        self._state = state
        self._rank = rank
        self._world_size = world_size
        self._strict = strict
        self._unpickle = unpickle
        self._slots = slots
        self._fence = fence
        self._files = files
        self._left: list[Left] = []
        self._candidate: Candidate | None = None

    def run(self, meeting: Meeting) -> Outcome:
        """Restore. All ranks must call it.

        Returns:
            What was agreed.

        Raises:
            StateError, CorruptCheckpoint: nothing was touched.
        """
        self._left = self._slots.left()
        held = [(item.step, item.attempt) for item in self._left if item.world_size == self._world_size]
        try:
            outcome = agree(meeting, self._rank, self._propose, held, self._examine)
            if outcome.source and self._candidate is not None:
                self._candidate.take()
                log.info("restored step %d from %s", outcome.step, outcome.source)
        except BaseException as error:
            meeting.give_up(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._candidate = None
        if self._rank == 0:
            housekeeping.put_aside(self._directory, outcome.damaged, self._fence, self._files)
            meeting.tell("settled", outcome.step)
        meeting.hear("settled", 0)  # no rank may ask for a damaged step's name before it is free
        self._slots.adopt(self._left)
        self._left = []
        return outcome

    def _room(self, nbytes: int) -> memoryview | None:
        return direct.room(nbytes) if self._slots.allow(nbytes) else None

    def _examine(self, proposal: Proposal) -> dict[str, Any]:
        self._candidate = candidate = Candidate(
            self._state, self._rank, self._world_size, self._strict, self._unpickle, self._files, self._room
        )
        for item in self._left:
            if f"memory:{item.attempt}" == proposal.source and item.step == proposal.step:
                return candidate.examine_memory(item.entries, item.places, item.segment).to_json()
        try:
            found = catalog.read_checkpoint(self._directory / proposal.source, self._files)
        except CorruptCheckpoint as error:
            return Found(faults=[str(error)]).to_json()
        except OSError as error:
            return Found(unreadable=str(error)).to_json()
        return candidate.examine_file(found).to_json()

    def _propose(self, held: Sequence[Any]) -> list[Proposal]:
        committed = []
        for step, path in catalog.folders(self._directory, self._files):
            broken = ""
            try:
                catalog.read_checkpoint(path, self._files)
            except CorruptCheckpoint as error:
                broken = str(error)
            except OSError:
                pass  # each rank tries for itself, and says what it found
            committed.append((step, path, broken))
        return proposals(committed, held)
