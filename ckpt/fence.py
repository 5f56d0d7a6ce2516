"""Who may change a checkpoint directory: attempts, their order, and the fence against those of the past.

An attempt is a text; of two, the one that sorts later is the newer. Rank 0 of each attempt writes its name into the
directory's file `.attempt`. A writer that finds a newer name there can neither commit nor delete.
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
from transom_hpc.ckpt.files import Files

FILE = ".attempt"
_SAFE = re.compile(r"[A-Za-z0-9_+~-][A-Za-z0-9._+~-]{0,62}")
_TEMPORARY = re.compile(r"\.(?:step-\d+|restore|trash-step-\d+)\.(.+)\.(\d+)")


def from_environment(environment: Mapping[str, str]) -> str | None:
    """The attempt's name as the launcher of the ranks gives it; None without a launcher that is known."""
    job = environment.get("SLURM_JOB_ID", "")
    if job.isdigit() and environment.get("SLURM_STEP_ID", "").isdigit():
        restarts = environment.get("SLURM_RESTART_COUNT", "0") or "0"
        return f"J{int(job):012d}-R{int(restarts):04d}-S{int(environment['SLURM_STEP_ID']):06d}"
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run:
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"E{re.sub('[^A-Za-z0-9_-]', '_', run)[:40]}-R{int(restarts):04d}"
    return None


def choose(given: str | None, world_size: int, environment: Mapping[str, str], newest: str, now: datetime) -> str:
    """Decide on this attempt's name.

    Args:
        given: by the caller; wins.
        world_size: ranks that must have the same name.
        environment: of the process.
        newest: the name that announced itself last; empty for none.
        now: date and time in UTC.

    Raises:
        UsageError: several ranks, and nothing that gives them the same name.
    """
    if given is not None:
        check_name(given)
        return given
    if world_size == 1:
        name = f"T{now:%Y%m%dT%H%M%S.%f}"
        return name if name > newest else f"{newest[:40]}~{name[-12:]}"
    found = from_environment(environment)
    if found is None:
        raise UsageError(
            f"{world_size} ranks need a common name for this attempt: pass attempt= to Checkpointer, the same text on "
            "all ranks and one that sorts after those of earlier attempts"
        )
    return found


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
        try:
            value = json.loads(self._files.read(self._path))
            return str(value["attempt"]), str(value["who"])
        except FileNotFoundError:
            return "", ""
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} can't be read ({error}); remove it if no job writes to this directory", path=self._path
            ) from error

    def announce(self) -> None:
        """Take the directory over from older attempts. Rank 0 only.

        Raises:
            CheckpointError: a newer attempt has it.
        """
        newest, who = self.newest()
        if newest > self.attempt:
            raise CheckpointError(
                f"{self._path.parent} is in use by attempt {newest} ({who}), which is newer than {self.attempt}; "
                "use another directory, or an attempt= that sorts after it",
                path=self._path.parent,
                attempt=newest,
            )
        if newest != self.attempt:
            self._files.write(self._path, json.dumps({"attempt": self.attempt, "who": whoami()}).encode() + b"\n")

    def check(self) -> None:
        """Raises SaveError when a newer attempt has the directory."""
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
