"""The tree of errors. One root, so that a caller can catch everything of ours with one name.

::

    TransomError                     exit code 1
    ├── UsageError                   exit code 2: the caller can put it right; nothing was done
    │   ├── HostListError            a host list that can't be read
    │   ├── JobIdError               a job id that can't be read
    │   ├── SpecError                a job spec that can't be run
    │   ├── SiteError                a site config with a wrong key or value
    │   ├── RunDirError              a run directory that is missing, unwritable or not ours
    │   └── SlurmMissing             no Slurm on this machine
    ├── SlurmError                   a Slurm program did not do what it was asked
    │   ├── SlurmRefused             Slurm answered, and the answer is no
    │   └── SlurmUnreachable         no answer: what we asked about is UNKNOWN
    ├── CheckpointError              saving or restoring
    │   ├── StateError               the state has something that can't be saved, or does not fit the model
    │   ├── SaveError                a save failed; what was committed before is untouched
    │   ├── OtherFormat              a checkpoint that another version of this package wrote
    │   └── CorruptCheckpoint        bytes on disk are not the bytes that were written
    ├── LaunchError                  the launcher can't go on
    └── LabError                     the lab did not do what it was asked
"""

from __future__ import annotations

from typing import Any


class TransomError(Exception):
    """Root of all errors of this package.

    Args:
        message: one line for a person: what is wrong, and what to do next.
        facts: what it is about (job, node, step, path, command), kept as attributes.
    """

    exit_code = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), str(self), self.facts))


def _rebuild(cls: type[TransomError], message: str, facts: dict[str, Any]) -> TransomError:
    return cls(message, **facts)


class UsageError(TransomError):
    """The caller can put it right; nothing was done."""

    exit_code = 2


class HostListError(UsageError, ValueError):
    """A host list that can't be read. Facts: text, part."""


class JobIdError(UsageError, ValueError):
    """A job id that can't be read. Facts: text."""


class SpecError(UsageError, ValueError):
    """A job spec that can't be run. Facts: field."""


class SiteError(UsageError, ValueError):
    """A site config with a wrong key or value. Facts: path, key."""


class RunDirError(UsageError):
    """A run directory that is missing, unwritable or not ours. Facts: path."""


class SlurmMissing(UsageError):
    """No Slurm on this machine. Facts: command."""


class SlurmError(TransomError):
    """A Slurm program did not do what it was asked. Facts: command, code, answer."""


class SlurmRefused(SlurmError):
    """Slurm answered, and the answer is no."""


class SlurmUnreachable(SlurmError):
    """No answer in time, or none that can be read: what we asked about is UNKNOWN."""


class CheckpointError(TransomError):
    """Saving or restoring went wrong. Facts: step, path."""


class StateError(CheckpointError, ValueError):
    """The state has something that can't be saved, or does not fit the model. Facts: name."""


class SaveError(CheckpointError):
    """A save failed; what was committed before is untouched. Facts: step, path."""


class OtherFormat(CheckpointError):
    """A checkpoint that another version of this package wrote: nothing is wrong with it. Facts: path, step."""


class CorruptCheckpoint(CheckpointError):
    """Bytes on disk are not the bytes that were written. Facts: path, step, name, offset."""


class LaunchError(TransomError):
    """The launcher can't go on. Facts: run, attempt."""


class LabError(TransomError):
    """The lab did not do what it was asked. Facts: lab, host, command."""
