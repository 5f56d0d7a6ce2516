"""Who may change a checkpoint directory: attempts, their order, and the fence against those of the past.

An attempt is a text. Of two of one family (one Slurm job, one launcher's journal, names that a person gives) the one
that sorts later is the newer, whenever it comes. Between families nothing can be told from the names: a Slurm job with
a lower number may run after one with a higher one, and a clock may have been set back. There the newcomer is the newer,
once `claim` has found nobody alive. Rank 0 of each attempt writes its name into the directory's file `.attempt`. A
writer that finds another name there can neither commit nor delete.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from transom_hpc.base.errors import CheckpointError, SaveError, UsageError
from transom_hpc.ckpt import claim
from transom_hpc.ckpt.files import Files

FILE = ".attempt"
_SAFE = re.compile(r"[A-Za-z0-9_+~-][A-Za-z0-9._+~-]{0,62}")
_TEMPORARY = re.compile(r"\.(?:step-\d+|restore|trash-step-\d+)\.(.+)\.(\d+)")


def from_environment(environment: Mapping[str, str]) -> str | None:
    """The attempt's name as Slurm gives it to all tasks of a step; None outside a step."""
    job = environment.get("SLURM_JOB_ID", "")
    if not (job.isdigit() and environment.get("SLURM_STEP_ID", "").isdigit()):
        return None
    restarts = environment.get("SLURM_RESTART_COUNT", "0") or "0"
    cluster = re.sub("[^A-Za-z0-9_-]", "_", environment.get("SLURM_CLUSTER_NAME", ""))[:16]
    where = f"+{cluster}" if cluster else ""
    return f"J{int(job):012d}{where}-R{int(restarts):04d}-S{int(environment['SLURM_STEP_ID']):06d}"


def family(name: str) -> str:
    """What a name can be compared within: see above. Pure."""
    slurm = re.match(r"(J\d{12}(?:\+[A-Za-z0-9_-]+?)?)-R\d+-S\d+$", name)
    if slurm:
        return slurm[1]
    if re.match(r"T\d{8}T", name):
        return "T"
    launcher = re.match(r"A(\d+)-L\d+$", name)
    return f"A{len(launcher[1])}" if launcher else ""


def is_before(old: str, new: str) -> bool:
    """Whether one attempt is over where another one, which has the directory, has begun. Pure."""
    return old != new and (family(old) != family(new) or old < new)


def choose(given: str | None, world_size: int, environment: Mapping[str, str]) -> str | None:
    """Decide on this attempt's name, where all ranks know it by themselves.

    Args:
        given: by the caller; wins.
        world_size: ranks that must have the same name.
        environment: of the process.

    Returns:
        The name; None where rank 0 must make one (see `fresh`).
    """
    if given is not None:
        check_name(given)
        return given
    return None if world_size == 1 else from_environment(environment)


def fresh(newest: str, now: datetime) -> str:
    """A name that nobody had before and that counts as newer than `newest`, whatever the clock says.

    Args:
        newest: the name that announced itself last; empty for none.
        now: date and time in UTC.
    """
    name = f"T{now:%Y%m%dT%H%M%S.%f}"
    if family(newest) != "T" or name > newest:
        return name
    begin, _, count = newest.partition("~")  # the clock went back
    return f"{begin[:40]}~{int(count) + 1 if count.isdigit() else 1:08d}"


def check_name(name: str) -> None:
    """Raises UsageError where a text can't be an attempt's name: it becomes part of names of files."""
    if not _SAFE.fullmatch(name):
        raise UsageError(f"attempt={name!r}: use up to 63 letters, digits and ._+~-", attempt=name)


def environment() -> Mapping[str, str]:
    """This process's environment."""
    return os.environ


def attempt_of(name: str) -> str | None:
    """The attempt that a temporary folder belongs to; None where the name is none of ours."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


class Fence:
    """One attempt's right to change a directory.

    Args:
        directory: that holds the checkpoints.
        attempt: this one's name.
    """

    def __init__(self, directory: Path, attempt: str, files: Files) -> None:
        self._path = directory / FILE
        self.attempt = attempt
        self._files = files

    def newest(self) -> tuple[str, str]:
        """The attempt that announced itself last, and who it is; two empty texts for none."""
        attempt, who, _ = self._read()
        return attempt, who

    def _read(self) -> tuple[str, str, str]:
        try:
            value = json.loads(self._files.read(self._path))
            return str(value["attempt"]), str(value["who"]), str(value.get("start", ""))
        except FileNotFoundError:
            return "", "", ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self._path} can't be read ({error}); remove it if no job writes to this directory", path=self._path
            ) from error

    def announce(self) -> None:
        """Take the directory over from older attempts. Rank 0 only.

        Raises:
            CheckpointError: a newer attempt has it, or an earlier start had the same name.
        """
        newest, who, start = self._read()
        mine = claim.this_start()
        if newest and newest == self.attempt and start != mine:
            raise CheckpointError(
                f"attempt {self.attempt} of {self._path.parent} was used before, by {who}: give each start of the "
                "program another attempt=, one that sorts after it, or leave attempt= out",
                path=self._path.parent,
                attempt=newest,
            )
        if newest and newest != self.attempt and not is_before(newest, self.attempt):
            raise CheckpointError(
                f"{self._path.parent} is in use by attempt {newest} ({who}), which is newer than {self.attempt}: give "
                f"an attempt= that sorts after it or use another directory; if {newest} is over and was no later than "
                f"this one, remove {self._path}",
                path=self._path.parent,
                attempt=newest,
            )
        if newest != self.attempt:
            told = {"attempt": self.attempt, "who": whoami(), "start": mine}
            self._files.write(self._path, json.dumps(told).encode() + b"\n")

    def check(self) -> None:
        """Raises SaveError when another attempt has the directory."""
        newest, who = self.newest()
        if newest != self.attempt:
            raise SaveError(
                f"attempt {self.attempt} may not write to {self._path.parent} any more: attempt {newest} ({who}) has "
                "it",
                path=self._path.parent,
                attempt=newest,
            )


def whoami() -> str:
    """Host, process and job, for people."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{socket.gethostname()} pid {os.getpid()}" + (f" job {job}" if job else "")
