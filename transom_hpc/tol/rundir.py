"""The run directory: its places, how it is made, and the list of a user's runs."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from transom_hpc.base.atomic import write_bytes
from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.journal import Entry, read_journal
from transom_hpc.tol.spec import Submitted

# Memory of one host only; /tmp on a disk can't be told from a shared disk here, the launcher finds that out.
_NOT_SHARED = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory on the shared file system.

    Args:
        path: absolute.
    """

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> RunDir:
        """The run directory at a path, made absolute; `~` is the user's home."""
        return cls(Path(path).expanduser().absolute())

    @property
    def spec(self) -> Path:
        """spec.json: what was submitted."""
        return self.path / "spec.json"

    @property
    def journal(self) -> Path:
        """Folder of the journal."""
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.path / "logs"

    @property
    def request(self) -> Path:
        """request.json: what a person asks of the launcher, until it has taken it up."""
        return self.path / "request.json"

    def create(self) -> None:
        """Make the directory and its folders; one that is there already is kept.

        Raises:
            RunDirError: it can't be made or written, or lies in one host's memory.
        """
        try:
            kind = _file_system(self.path)
            if kind in _NOT_SHARED:
                raise RunDirError(
                    f"run directory {self.path} is not shared: it lies on {kind}, in this host's memory. "
                    "Choose one on the cluster's shared file system with --run-dir",
                    path=self.path,
                )
            self.path.mkdir(parents=True, exist_ok=True)
            names = [entry.name for entry in self.path.iterdir()]
            foreign = [name for name in names if name not in _OURS and not name.startswith(".")]
            if foreign and not self.spec.exists():
                raise RunDirError(
                    f"{self.path} is not a run directory: it holds {foreign[0]!r}. Name an empty or a new folder",
                    path=self.path,
                )
            for folder in (self.journal, self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunDirError(f"can't write run directory {self.path}: {error.strerror}", path=self.path) from error

    def write(self, submitted: Submitted) -> None:
        """Write spec.json."""
        write_bytes(self.spec, submitted.to_json())

    def submitted(self) -> Submitted:
        """Read spec.json.

        Raises:
            RunDirError: this is no run directory of ours.
        """
        try:
            return Submitted.from_json(self.spec.read_bytes(), self.spec)
        except OSError as error:
            raise RunDirError(f"{self.path} is not a run directory: no spec.json in it", path=self.path) from error

    def entries(self) -> list[Entry]:
        """The journal, read whole."""
        return read_journal(self.journal)

    def committed_steps(self) -> list[int]:
        """Steps that have a committed checkpoint by the look of their folder, oldest first; nothing is verified."""
        steps = []
        for path in self.checkpoints.glob("step-*"):
            if path.name[5:].isdigit() and (path / "manifest.json").exists():
                steps.append(int(path.name[5:]))
        return sorted(steps)

    def saves_under_way(self, attempt: str) -> bool:
        """Whether a save of this attempt has begun and is neither committed nor given up, by the look of its folder."""
        for path in self.checkpoints.glob(f".step-*.{attempt}.*"):
            try:
                if not any(name.startswith("failed-") for name in os.listdir(path)):  # noqa: PTH208  (also on NFS)
                    return True
            except OSError:  # committed meanwhile
                continue
        return False


_OURS = frozenset({"spec.json", "request.json", "journal", "checkpoints", "logs", "health"})


def _file_system(path: Path) -> str:
    resolved = path.resolve()
    best = ("", "")
    for part in psutil.disk_partitions(all=True):
        mount = Path(part.mountpoint)
        if (resolved == mount or mount in resolved.parents) and len(part.mountpoint) >= len(best[0]):
            best = (part.mountpoint, part.fstype)
    return best[1]


def _registry() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "transom" / "runs"


def register(run: RunDir) -> None:
    """Put a run on its user's list, so that `transom status` finds it without being told where it is.

    The list is a convenience: where the home directory can't be written, nothing is done.
    """
    try:
        folder = _registry()
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.blake2s(str(run.path).encode(), digest_size=8).hexdigest()
        write_bytes(folder / name, str(run.path).encode())
    except (OSError, RuntimeError):
        pass


def registered() -> list[RunDir]:
    """The user's runs whose directories are still there, newest first."""
    found = []
    try:
        for entry in _registry().iterdir():
            run = RunDir(Path(os.fsdecode(entry.read_bytes())))
            try:
                found.append((run.spec.stat().st_mtime, run))
            except OSError:
                continue
    except (OSError, RuntimeError):
        return []
    return [run for _, run in sorted(found, key=lambda item: item[0], reverse=True)]
