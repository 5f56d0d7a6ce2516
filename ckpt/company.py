"""A server's part in the company of its step's servers: gathers when it begins, and copies what is saved."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.ckpt import slots
from transom_hpc.ckpt.copies import Copies
from transom_hpc.ckpt.exchange import Exchange, Facts, Intake
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.gathering import Gatherer
from transom_hpc.ckpt.neighbours import Neighbours
from transom_hpc.ckpt.orders import Order
from transom_hpc.ckpt.ring import Peer, Post
from transom_hpc.ckpt.roster import Roster
from transom_hpc.ckpt.slots import Left

log = logging.getLogger("transom_hpc.ckpt")


class Company:
    """The other servers, as one of them sees them.

    Args:
        host: this one's host.
        peers: all of them, in the order of their numbers.
        post: the network.
        roster: who takes part in the launch.
        limit: bytes that all segments of the host may take together; None for what the host has.
    """

    def __init__(
        self,
        host: str,
        peers: list[Peer],
        post: Post,
        roster: Roster,
        limit: int | None,
        files: Files,
        clock: Clock,
    ) -> None:
        self._host = host
        self._peers = peers
        self._post = post
        self._roster = roster
        self._limit = limit
        self._files = files
        self._clock = clock
        self._neighbours: Neighbours | None = None
        self._exchange: Exchange | None = None

    @property
    def is_on_a_spare(self) -> bool:
        """Whether no rank runs on this host."""
        return self._host in self._roster.spares

    def begin(self, folder: Path) -> None:
        """Take part, with the segments of a staging folder; returns at once."""
        ranks = self._roster.homes.count(self._host)
        copies = Copies(folder, self._host, self._limit, ranks, self._files)

        def accept(_: int, facts: Facts) -> Intake | str:
            return copies.accept(facts)

        exchange = self._exchange = Exchange(self._post, self._clock, accept)
        exchange.start()
        self._neighbours = Neighbours(self._host, self._peers, self._roster, exchange, copies)
        self._neighbours.start()
        gatherer = Gatherer(self._host, self._peers, self._roster, exchange, copies, folder, self._files, self._clock)
        threading.Thread(target=gatherer.run, name="transom-gather", daemon=True).start()

    def close(self) -> None:
        """Take part no more; what is on its way is left."""
        if self._exchange is not None:
            self._exchange.close()

    def save(self, order: Order, left: Left) -> None:
        """A segment is whole: have it copied. Returns at once."""
        if self._neighbours is not None:
            self._neighbours.save(_whose(order), left)

    def copied(self, order: Order) -> int:
        """Wait until a segment that was saved is on its way nowhere any more.

        Returns:
            How many other hosts have it.
        """
        return self._neighbours.arrived(_whose(order)) if self._neighbours is not None else 0

    def committed(self, order: Order) -> None:
        """It is on disk."""
        if self._neighbours is not None:
            self._neighbours.committed(_whose(order), order.job.step)


def _whose(order: Order) -> str:
    return slots.prefix(order.job.directory, order.job.rank)
