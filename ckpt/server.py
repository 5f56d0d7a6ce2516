"""The checkpoint server of a node: carries out the saves that programs of this node have staged, one thread a save:
writes them, or has them copied to other hosts only.

The program only stages; its death does not stop a save that it has ordered, and the server's death does not lose one:
the order lies in the shared memory of both (see orders), and the next server takes it up. `python -m
transom_hpc.ckpt.server --shm FOLDER` is one; it serves until its folder has gone, or it is asked to leave and nobody
needs it any more.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import CheckpointError, SaveError
from transom_hpc.ckpt import commit, fence, h5file, manifest, orders, shm
from transom_hpc.ckpt.bell import Bell
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.company import Company
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.meeting import FileMeeting
from transom_hpc.ckpt.orders import Claim, Order, Orders, Rank, Signs
from transom_hpc.ckpt.ring import Peer, Ring
from transom_hpc.ckpt.roster import Roster
from transom_hpc.ckpt.saver import tidy
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.slots import Left, read_left
from transom_hpc.ckpt.writers import ASKED, Asked, Collective, Writers

log = logging.getLogger("transom_hpc.ckpt")

EXIT_NOT_ALONE = 3
"""Exit status where another server has the folder."""

EXIT_LOST = 4
"""Exit status when a collective write has got stuck, and h5py with it: a new process can go on."""

POLL_S = 0.03
"""Between two looks where no bell rings."""

LOOK_S = 0.1
"""Between two looks where one would."""

PULSE_S = 0.5
ALONE_S = 5.0
"""Longest wait for a server before this one to let go of the folder."""


class Held:
    """A save's bytes in a segment that is whole."""

    def __init__(self, left: Left) -> None:
        self.outline: Sequence[Entry] = left.entries
        self._left = left

    def data(self, index: int, begin: int, end: int) -> memoryview:
        """See staging.Source."""
        at = self._left.places[index]
        return self._left.segment.data(at + begin, at + end)

    def entries(self) -> list[Entry]:
        """See staging.Source."""
        return list(self._left.entries)

    def confirm(self) -> None:
        """Nothing was torn: else it would not have been declared whole."""


class Server:
    """Serves one folder.

    Args:
        folder: the staging folder; one that is not there yet is waited for.
        files, clock: the hands.
        together: writes together with the other servers; None where that can't be.
        writer: which writer to take where a program leaves that open.
        company: the other servers; None where there are none.
        roster: who takes part in the launch; None where nobody has said.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        clock: Clock,
        together: Collective | None = None,
        writer: Asked = "auto",
        company: Company | None = None,
        roster: Roster | None = None,
    ) -> None:
        self._company = company
        self._roster = roster
        self._path = folder
        self._files = files
        self._clock = clock
        self._together = together
        self._writer: Asked = writer
        self._orders = Orders(folder, files)
        self._in_hand: set[str] = set()
        self._blanks: dict[tuple[Path, int, int], Blanks] = {}
        self.leaving = False
        """Set from outside: leave as soon as no rank lives and nothing is in hand."""

    def serve(self) -> int:
        """Serve until the folder has gone, or nobody needs us any more after `leaving` was set.

        Returns:
            An exit status.

        Raises:
            CheckpointError: the folder is someone else's.
        """
        while not self._path.exists() and not self._is_on_a_spare():
            if self.leaving:
                return 0
            self._clock.sleep(POLL_S)
        folder = shm.Folder(self._path, False, self._files)
        folder.open()
        until = self._clock.now() + ALONE_S
        while (held := orders.hold(self._path / orders.SERVER, self._files)) is None:
            if self._clock.now() >= until:
                log.error("another checkpoint server has %s", self._path)
                return EXIT_NOT_ALONE
            self._clock.sleep(POLL_S)
        log.info("serving %s", self._path)
        if self._company is not None:
            self._company.begin(self._path)
        elif self._roster is not None:  # there is nobody from whom anything could come
            orders.sign(self._path, Signs(self._roster.attempt, True), self._files)
        try:
            with Bell(self._path, self._clock) as bell:
                return self._serve(held, bell)
        finally:
            if self._company is not None:
                self._company.close()

    def _is_on_a_spare(self) -> bool:
        """Whether nobody else makes the folder."""
        return self._company is not None and self._company.is_on_a_spare

    def _serve(self, held: int, bell: Bell) -> int:
        pulse_at, changed, rang = self._clock.now(), 0, False
        while os.fstat(held).st_nlink or self._in_hand:  # without a name: the folder was removed, or made anew
            pulse = self._clock.now() >= pulse_at
            # two changes in one tick of the kernel's look like one
            if changed != (changed := self._changed()) or pulse or rang:
                self._look()
            if self._together is not None and self._together.lost and not self._in_hand:
                log.error("%s", self._together.lost)
                return EXIT_LOST
            if pulse:
                pulse_at = self._clock.now() + PULSE_S
                os.utime(held)
                ranks = self._orders.ranks()
                if self.leaving and not self._in_hand and not any(alive for _, alive in ranks):
                    break
                for rank, alive in ranks:
                    if not alive:
                        self._give_up_for(rank)
            rang = bell.wait(LOOK_S, POLL_S)
        return 0

    def _changed(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def _look(self) -> None:
        """Take up what is to be done."""
        for name in self._orders.waiting():
            claim = None if name in self._in_hand else self._orders.claim(name)
            if claim is not None and self._orders.answered(name)[0]:  # between our look and the claim
                claim.release()
            elif claim is not None:
                self._in_hand.add(name)
                threading.Thread(target=self._work, args=(name, claim), name="transom-save", daemon=True).start()

    def _work(self, name: str, claim: Claim) -> None:
        """One order, in a thread of its own."""
        try:
            error: BaseException | None = None
            order: Order | None = None
            left: Left | None = None
            copies = 0
            try:
                order = orders.decode(claim.order)
                left = self._find(order)
                if self._company is not None:
                    self._company.save(order, left)
                if order.write:
                    self._carry_out(order, left)
                elif self._company is not None:
                    copies = self._company.copied(order)
            except BaseException as found:  # the program that asked for it reports it
                log.info("%s: %s: %s", name, type(found).__name__, found)
                error = found
            self._orders.answer(name, error, copies)
            written = error is None and order is not None and order.write
            if written and order is not None and self._company is not None:
                self._company.committed(order)
            del left  # giving its memory back takes time that nobody should wait for
            if not self._files.exists(self._path / name.rpartition(".")[0]):
                self._orders.forget(name)  # its program is dead, or has given us up
            if written and order is not None and order.job.rank == 0:
                tidy(order.job, order.keep, Fence(order.job.directory, order.job.attempt, self._files), self._files)
        except OSError as error:
            log.info("%s can't be answered: %s", name, error)  # the folder has gone
        finally:
            claim.release()
            self._in_hand.discard(name)

    def _find(self, order: Order) -> Left:
        job = order.job
        left = read_left(Segment(self._path / order.segment, self._files))
        if left is None or (left.step, left.attempt) != (job.step, job.attempt):
            raise SaveError(f"step {job.step} was not saved: its bytes in shared memory have gone", step=job.step)
        return left

    def _carry_out(self, order: Order, left: Left) -> None:
        job = order.job
        key = (job.directory, order.align_bytes, order.count)
        blanks = self._blanks.setdefault(key, Blanks(self._files, order.align_bytes, order.count))
        right = Fence(job.directory, job.attempt, self._files)
        asked = self._writer if order.writer == "auto" else order.writer
        writers = Writers(self._files, self._together, asked, self._clock)
        commit.commit(job, Held(left), writers, blanks, right, self._files, self._clock)
        if job.rank == 0:
            log.info("step %d is committed", job.step)

    def _give_up_for(self, rank: Rank) -> None:
        """A rank that has died orders no more saves: the others need not wait for its part of those under way."""
        try:
            ordered = {int(name.rpartition(".")[2]) for name in self._orders.of(rank.prefix + rank.attempt)}
            for name in self._files.names(rank.directory):
                if not name.startswith(".step-") or fence.attempt_of(name) != rank.attempt:
                    continue
                if int(name.rpartition(".")[2]) not in ordered:
                    self._give_up(rank, rank.directory / name)
        except OSError as error:
            log.debug("%s: %s", rank.directory, error)

    def _give_up(self, rank: Rank, folder: Path) -> None:
        there = self._files.names(folder)
        if any(name.startswith("failed-") for name in there) or manifest.FILE in there:
            return
        if rank.rank and f"written-{rank.rank:05d}.json" in there:
            return
        meeting = FileMeeting(folder, rank.rank, rank.world_size, self._files, self._clock, 0.0, "")
        meeting.give_up("its program has died before the state was copied")
        log.info("%s is given up for rank %d, whose program has died", folder.name, rank.rank)


def _ignore(_number: int, _frame: object) -> None:
    """A handler is not inherited by children, as SIG_IGN would be."""


def main() -> None:
    """Serve, beside the other nodes' servers."""
    parser = argparse.ArgumentParser(prog="python -m transom_hpc.ckpt.server", description=__doc__)
    parser.add_argument("--shm", required=True, type=Path, help="the staging folder, in /dev/shm")
    parser.add_argument("--ranks", type=int, default=1, help="servers of this step; above one they meet over MPI")
    parser.add_argument("--writer", choices=ASKED, default="auto", help="where a program leaves it open")
    parser.add_argument("--roster", type=Roster.parse, help="who takes part, as JSON")
    parser.add_argument("--limit", type=int, help="bytes that all segments of a host may take together")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.uname().nodename}: %(message)s")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, _ignore)  # Slurm signals every step
    h5file.load()
    files, clock = Files(), SystemClock()
    together, company, roster = None, None, given.roster
    if given.ranks > 1:
        me = Peer(
            os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0],
            os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
        )
        ring = Ring(me)
        log.info("rank %d of %d, for %d nodes", ring.rank, ring.size, given.ranks)
        together = ring.writer(files, clock, roster.serving if roster else [peer.host for peer in ring.peers])
        if roster is not None and ring.size == given.ranks:
            company = Company(me.host, ring.peers, ring, roster, given.limit, files, clock)
    server = Server(given.shm, files, clock, together, given.writer, company, roster)

    def leave(_number: int, _frame: object) -> None:
        server.leaving = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        code = server.serve()
    except CheckpointError as error:
        log.error("%s", error)
        code = error.exit_code
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # without MPI_Finalize, which would wait for the dead


if __name__ == "__main__":
    main()
