"""Site configs: what is particular about one cluster, in a TOML file.

Owns the keys, their types and defaults, and where the files are looked for. Never asks Slurm whether they are right.
"""

from __future__ import annotations

import difflib
import signal as signals
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from transom_hpc.base.errors import SiteError

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Word = Annotated[str, msgspec.Meta(min_length=1)]

_PACKAGED = Path(__file__).resolve().parents[1] / "site_configs"


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """What to tell Slurm on this cluster, and what our own parts should know of it."""

    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    constraint: _Word | None = None
    mpi: _Word = "pmix"
    """For `srun --mpi`."""
    signal: str = "USR1"
    """By which Slurm announces the end of the job's time."""
    signal_lead_s: _NotNegative = 120
    """How long before."""
    interface: _Word | None = None
    """Network interface for gloo, NCCL and MPI."""
    setup: list[str] = field(default_factory=list)
    """Shell lines for the batch script, before anything of ours runs."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the program."""
    sbatch: dict[str, str | int | bool] = field(default_factory=dict)
    """More flags of sbatch, without the dashes; true stands for a flag without a value."""
    srun: list[str] = field(default_factory=list)
    """More arguments of srun."""
    sample_period_s: _Seconds = 2.0
    """How often a node is looked at."""
    silent_periods: _Positive = 3
    """After how many periods without a word a node counts as silent."""
    staging_bytes: _Positive | None = None
    """Shared memory of a node that checkpoints may use; None: found out on the node."""
    copies: _NotNegative = 1
    """How many other nodes keep a copy of what a node has staged."""
    copy_distance: _Positive = 1
    """The first of them is so many places after it in the order of ranks."""
    switches: dict[str, str] = field(default_factory=dict)
    """Which nodes hang on which switch, as host lists; empty: as Slurm says."""
    stripe_bytes: _Positive = 4096
    """What the data in checkpoint files is aligned to."""
    data_files: _Positive = 1
    """Over how many files the data of a checkpoint is spread."""
    writer: Literal["auto", "direct", "mpio"] = "auto"
    """Who puts it there; "auto": the faster one, measured."""
    hang_after_s: _Seconds | None = None
    """After how long without a step the program counts as hung; None: learned from its own pace."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "signal", self.signal.removeprefix("SIG"))
        if f"SIG{self.signal}" not in signals.Signals.__members__:
            raise ValueError(f"no signal has the name {self.signal!r}")
        if self.stripe_bytes < 4096 or self.stripe_bytes & (self.stripe_bytes - 1):
            raise ValueError(f"stripe_bytes must be a power of two of at least 4096, not {self.stripe_bytes}")


def load_site(name_or_path: str) -> SiteConfig:
    """Read a site config.

    Args:
        name_or_path: a path (it ends in .toml, has a slash, or is a file), or a name, which is looked for as
            NAME.toml in the current folder, ~/.config/transom/sites, /etc/transom/sites and among those that come
            with the package; the first one found counts, alone.

    Raises:
        SiteError: there is none, or it has a wrong key or value.
    """
    path = _find(name_or_path)
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SiteError(f"can't read the site config {path}: {error}", path=str(path), key="") from error
    known = [key.name for key in fields(SiteConfig)]
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
            raise SiteError(f"{path}: there is no key {key!r}: {hint}", path=str(path), key=key)
    try:
        return msgspec.convert(found, SiteConfig)
    except msgspec.ValidationError as error:
        what, key = _wrong_value(found, error)
        raise SiteError(f"{path}: {key}: {what}", path=str(path), key=key) from error


def _wrong_value(found: dict[str, Any], error: msgspec.ValidationError) -> tuple[str, str]:
    """What is expected, and the key: from "Expected `int`, got `str` - at `$.signal_lead_s`"."""
    what, _, where = str(error).partition(" - at ")
    key = where.strip("`").removeprefix("$").removeprefix(".")
    if not key:  # checks of our own
        key = "stripe_bytes" if "stripe_bytes" in what else "signal"
    table, unnamed, _ = key.partition("[...]")  # msgspec does not name the key inside a table
    for name, value in found[table].items() if unnamed else ():
        try:
            msgspec.convert({table: {name: value}}, SiteConfig)
        except msgspec.ValidationError:
            return what, f"{table}.{name}"
    return what, key


def _find(name_or_path: str) -> Path:
    direct = Path(name_or_path).expanduser()
    if direct.is_file():
        return direct
    if name_or_path.endswith(".toml") or "/" in name_or_path or not name_or_path:
        raise SiteError(f"there is no site config {name_or_path!r}", path=name_or_path, key="")
    folders = [Path(), Path.home() / ".config/transom/sites", Path("/etc/transom/sites"), _PACKAGED]
    for folder in folders:
        if (path := folder / f"{name_or_path}.toml").is_file():
            return path
    there = sorted({path.stem for folder in folders[1:] for path in folder.glob("*.toml")})
    raise SiteError(
        f"there is no site config {name_or_path!r}; there are {', '.join(there)}. Looked for {name_or_path}.toml in "
        + ", ".join(str(folder) for folder in folders),
        path=name_or_path,
        key="",
    )
