"""One restore on one rank, from what is there to a filled state: candidates, agreement, and what is put aside."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import CorruptCheckpoint, OtherFormat
from transom_hpc.ckpt import catalog, direct, housekeeping
from transom_hpc.ckpt.agree import MEMORY, Mates, Outcome, Proposal, agree, proposals
from transom_hpc.ckpt.distrust import Distrust
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import plan
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.meeting import Meeting
from transom_hpc.ckpt.restore import Candidate, Found
from transom_hpc.ckpt.sharing import Company, Sharing
from transom_hpc.ckpt.shm import boot_id
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
        distrust: what is not to be restored.
        begin_below: where nothing that is trusted is left, the state stays as it is, for a start from the beginning,
            if not more steps than this come before what is not trusted.
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
        distrust: Distrust,
        begin_below: int,
    ) -> None:
        self._distrust = distrust
        self._begin_below = begin_below
        self._distrusted: list[str] = []
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
        self._here: dict[int, list[Left]] | None = None
        self._candidate: Candidate | None = None
        self._sharing: Sharing | None = None
        self._own_source = ""  # where this rank has it from, when that is not what all agreed on

    def run(self, meeting: Meeting) -> Outcome:
        """Restore. All ranks must call it.

        Returns:
            What was agreed.

        Raises:
            StateError, CorruptCheckpoint, OtherFormat: nothing was touched.
        """
        self._left = [item for item in self._slots.left() if not self._distrust.covers(item.step, item.attempt)]
        held = [(item.step, item.attempt) for item in self._left if item.world_size == self._world_size]
        if not held:  # as many ranks as now had nothing here, or there were others
            held = sorted(
                {(item.step, item.attempt) for left in self._all().values() for item in left if self._of_all(item)}
            )
        try:
            outcome = agree(meeting, self._rank, self._propose, held, _host(self._slots.path), self._examine)
            if outcome.source and self._candidate is not None:
                outcome = self._take(meeting, outcome, self._candidate)
            elif self._distrusted and self._distrust.below > self._begin_below:
                raise self._nothing_left()
        except BaseException as error:
            meeting.give_up(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._candidate = None
            if self._sharing is not None:
                self._sharing.close()
        if self._rank == 0:
            for kind, names in (
                (housekeeping.DAMAGED, outcome.damaged),
                (housekeeping.DISTRUSTED, self._distrusted),
            ):
                housekeeping.put_aside(self._directory, names, kind, self._fence, self._files)
            meeting.tell("settled", outcome.step)
        meeting.hear("settled", 0)  # no rank may ask for a damaged step's name before it is free
        if self._distrust.upto:
            self._slots.forget(self._distrust)
        self._slots.adopt(self._left)
        self._slots.clear()
        self._left, self._here = [], None
        return outcome

    def _take(self, meeting: Meeting, outcome: Outcome, candidate: Candidate) -> Outcome:
        candidate.take()
        needed, read, handed = candidate.needed_bytes, candidate.read_bytes, candidate.handed_bytes
        log.info(
            "restored step %d from %s: %d bytes, for which %d were read here and %d by others of this host",
            outcome.step,
            self._own_source or outcome.source,
            needed,
            read,
            handed,
        )
        if outcome.borrowed:  # who is done may use its segments anew, from which others still copy
            meeting.tell("taken", True)
            if self._rank == 0:
                meeting.hear_all("taken")
        source = self._own_source or outcome.source
        return replace(outcome, source=source, needed_bytes=needed, read_bytes=read, handed_bytes=handed)

    def _room(self, nbytes: int) -> memoryview | None:
        return direct.room(nbytes) if self._slots.allow(nbytes) else None

    def _examine(self, proposal: Proposal, mates: Mates) -> dict[str, Any]:
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None
        if len(mates.ranks) > 1 and not proposal.source.startswith(MEMORY):
            group = self._slots.prefix.partition("-rank-")[0]
            company = Company(self._slots.path, group, mates.token, self._rank, mates.ranks)
            self._sharing = Sharing(company, self._files, self._slots.allow)
        self._own_source = ""
        if proposal.source.startswith(MEMORY):
            return self._examine_memory(self._new_candidate(None), proposal).to_json()
        try:
            return self._examine_file(proposal).to_json()
        finally:
            if self._sharing is not None:
                self._sharing.tell({})  # it takes no part, unless it has

    def _new_candidate(self, sharing: Sharing | None) -> Candidate:
        self._candidate = Candidate(
            self._state,
            self._rank,
            self._world_size,
            self._strict,
            self._unpickle,
            self._files,
            self._room,
            sharing,
        )
        return self._candidate

    def _examine_file(self, proposal: Proposal) -> Found:
        """What the file holds; from this rank's own memory where it is the same, though others have lost theirs."""
        try:
            found = catalog.read_checkpoint(self._directory / proposal.source, self._files)
        except CorruptCheckpoint as error:
            return Found(faults=[str(error)])
        except OSError as error:
            return Found(unreadable=str(error))
        named = found.step, found.manifest.attempt, found.manifest.world_size
        own = next((i for i in self._left if (i.step, i.attempt, i.world_size) == named), None)
        if own is None or own.world_size != self._world_size:
            return self._new_candidate(self._sharing).examine_file(found)
        if self._sharing is not None:
            self._sharing.tell({})  # others need not wait for this rank
        said = self._examine_segments(self._new_candidate(None), {self._rank: own}, own.world_size)
        if said.good:
            self._own_source = f"{MEMORY}{own.attempt}"
            return said
        log.warning("step %d of this host's memory is not what was saved and is read from its file", own.step)
        return self._new_candidate(None).examine_file(found)

    def _examine_memory(self, candidate: Candidate, proposal: Proposal) -> Found:
        """First this rank's own segment; where the state is cut otherwise now, those of all ranks, if they are here."""
        named = proposal.step, proposal.source.removeprefix(MEMORY)
        own = next((i for i in self._left if (i.step, i.attempt) == named and i.world_size == self._world_size), None)
        if own is not None:
            found = self._examine_segments(candidate, {self._rank: own}, own.world_size)
            if found.good or found.faults:
                return found
        left = {rank: i for rank, items in self._all().items() for i in items if (i.step, i.attempt) == named}
        if left and self._of_all(next(iter(left.values()))):
            found = self._examine_segments(candidate, left, len(left))
            found.borrowed = True
            return found
        return found if own is not None else Found(unreadable="it is not in this host's memory any more")

    def _examine_segments(self, candidate: Candidate, left: Mapping[int, Left], world_size: int) -> Found:
        complete = len(left) == world_size
        segments = {item.segment.path.name: item.segment for item in left.values()}
        stored = self._stored_in(left, complete)
        return candidate.examine_memory(stored, segments, world_size, complete)

    def _stored_in(self, left: Mapping[int, Left], complete: bool) -> list[Stored]:
        """What segments of some ranks hold; what several hold is taken from this rank's own, if it is there."""
        ranks = sorted(left)
        files = {rank: left[rank].segment.path.name for rank in ranks}
        if len(ranks) == 1:
            (rank,) = ranks
            own = None if complete else rank
            pairs = zip(left[rank].entries, left[rank].places, strict=True)
            return [Stored(entry, own, entry.name, files[rank], at) for entry, at in pairs]
        places = {
            (rank, entry.name): at
            for rank in ranks
            for entry, at in zip(left[rank].entries, left[rank].places, strict=True)
        }
        stored = []
        for shard in plan([left[rank].entries for rank in ranks]).shards:
            holders = ranks if shard.rank is None else [ranks[shard.rank]]
            holders = [ranks[i] for i in shard.holders] or holders
            nearest = self._rank if self._rank in holders else holders[0]
            several = tuple(holders) if len(shard.holders) > 1 else ()
            own = None if shard.rank is None else holders[0]
            at = places[nearest, shard.entry.name]
            stored.append(Stored(shard.entry, own, shard.path, files[nearest], at, several))
        return stored

    def _all(self) -> dict[int, list[Left]]:
        """What all ranks left on this host. Looked for once, and only where this rank's own segments are not enough."""
        if self._here is None:
            here = self._slots.left_here()
            trusted = {
                rank: [item for item in items if not self._distrust.covers(item.step, item.attempt)]
                for rank, items in here.items()
            }
            self._here = {rank: items for rank, items in trusted.items() if items}
        return self._here

    def _of_all(self, item: Left) -> bool:
        """Whether this host has such a segment of every rank that there was."""
        alike = [
            rank
            for rank, items in self._all().items()
            if any((i.step, i.attempt, i.world_size) == (item.step, item.attempt, item.world_size) for i in items)
        ]
        return sorted(alike) == list(range(item.world_size))

    def _propose(self, held: Sequence[Any]) -> list[Proposal]:
        committed = []
        other: OtherFormat | None = None
        for step, path in catalog.folders(self._directory, self._files):
            broken = ""
            try:
                found = catalog.read_checkpoint(path, self._files)
                if self._distrust.covers(step, found.manifest.attempt):
                    log.warning("step %d of %s is not trusted, and not restored", step, found.manifest.attempt)
                    self._distrusted.append(path.name)
                    continue
            except CorruptCheckpoint as error:
                broken = str(error)
            except OtherFormat as error:
                other = error
                continue
            except OSError:
                pass  # each rank tries for itself, and says what it found
            if not broken:
                other = None
            committed.append((step, path, broken))
        if other is not None:  # the newest one is good for another version: going on without it would lose work
            raise other
        return proposals(committed, held)

    def _nothing_left(self) -> CorruptCheckpoint:
        path = self._directory / self._distrusted[0]
        return CorruptCheckpoint(
            f"no checkpoint is left that is trusted: from step {self._distrust.below} on they are not, as saved by "
            f"{self._distrust.upto} or before, and there is none of an earlier step. They are where they were, in "
            f"{self._directory}: give distrust='' to Checkpointer, or to its from_env, to go on from the newest of "
            "them all the same, or move them away to begin from nothing",
            step=self._distrust.below,
            path=path,
        )


def _host(folder: Path) -> str:
    """The same for all that see this folder."""
    facts = folder.stat()
    return f"{boot_id()}:{facts.st_dev}:{facts.st_ino}"
