"""Who takes part in a launch, as the launcher tells its checkpoint servers; and how they tell it something."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transom_hpc.ckpt.distrust import Distrust
from transom_hpc.ckpt.replicas import Holders, holders, switch_of
from transom_hpc.ckpt.ring import Peer

log = logging.getLogger("transom_hpc.ckpt")

MARK = "@transom "
"""How a line of a server's log begins that the launcher reads."""


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part in a launch, as the launcher says.

    Args:
        attempt: its name.
        serving: the hosts with ranks, in order of rank.
        spares: the hosts without.
        per_host: ranks of each host.
        switches: of the hosts, as the site config has it; empty where that says nothing.
        copies: of each segment.
        distance: see replicas.holders.
        directory: that the run's checkpoints are in; None where nobody knows.
        distrust: what is not to be restored.
    """

    attempt: str
    serving: Sequence[str]
    spares: Sequence[str]
    per_host: int
    switches: Mapping[str, str]
    copies: int
    distance: int
    directory: Path | None
    distrust: Distrust = field(default_factory=Distrust)

    @classmethod
    def parse(cls, text: str) -> Roster:
        """From JSON, as the launcher gives it."""
        facts = json.loads(text)
        directory = facts.pop("directory", None)
        distrust = Distrust.parse(facts.pop("distrust", ""))
        return cls(**facts, directory=None if directory is None else Path(directory), distrust=distrust)

    @property
    def homes(self) -> list[str]:
        """For each rank the host on which it runs."""
        return [host for host in self.serving for _ in range(self.per_host)]

    def holders(self, peers: Sequence[Peer]) -> Holders:
        """Who keeps copies for whom; what the site config says beats what Slurm says."""
        known = {peer.host: switch for peer in peers if (switch := switch_of(peer.switch))}
        return holders(self.serving, self.spares, self.switches or known, self.copies, self.distance)


def report(kind: str, **facts: object) -> None:
    """Tell the launcher something, by the log."""
    log.warning("%s%s", MARK, json.dumps({"kind": kind, **facts}))
