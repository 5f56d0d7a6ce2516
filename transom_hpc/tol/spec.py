"""What was asked for: the job spec, checked before anything is submitted. It never talks to Slurm."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from transom_hpc.base.errors import RunDirError, SpecError
from transom_hpc.slurm.hosts import expand_hosts
from transom_hpc.slurm.times import parse_time
from transom_hpc.tol.divergence import ActOn


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to be submitted.

    Args:
        nodes: nodes that the program runs on.
        min_nodes: the fewest nodes that the program can run on, if it can be restored on another number of ranks. Where
            nodes are lost and no spare is left, it goes on with what there is, instead of waiting in the queue. None:
            it needs all of `nodes`.
        spares: nodes that are allocated besides and stand by; one takes over when a node fails.
        tasks_per_node: program processes (ranks) a node.
        time: time limit, as Slurm writes it ("2:00:00", "1-12"); None: the partition's default.
        name: job name, and the start of the run directory's name.
        site: site config, a name or a path.
        cpus_per_task, gpus_per_node, mem, partition, account, qos, constraint: as for sbatch; None: the site's, else
            Slurm's default.
        exclude: host list that the job shall never run on.
        run_dir: run directory; None: `transom-runs/NAME-DATE-TIME` in the current folder. One that exists
            already goes on from its newest checkpoint.
        save_every: steps between checkpoints; or "auto": as often as loses least time, to saving and to failures.
        keep: how many committed checkpoints are kept.
        copies: how many other nodes keep a copy of what a node has staged; None: as the site config says.
        start_deadline_s: seconds from the start of the program to its first step before it counts as hung; None: half
            an hour for a program that uses a Checkpointer, no limit for one that doesn't.
        hang_after_s: seconds without a step before the program counts as hung; None: learned from its own step times.
        divergence: for which losses the program is started again from before them: "nan" for NaN and infinite ones;
            "spike" also for such as are far above all that there were; "never".
        local: run on this machine through submitit's local executor, without Slurm, for debugging.
    """

    nodes: int = 1
    min_nodes: int | None = None
    spares: int = 0
    tasks_per_node: int = 1
    time: str | None = None
    name: str = "transom"
    site: str = "default"
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str = ""
    run_dir: str | None = None
    save_every: int | Literal["auto"] = 100
    keep: int = 3
    copies: int | None = None
    start_deadline_s: float | None = None
    hang_after_s: float | None = None
    divergence: ActOn = "nan"
    local: bool = False

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in ("name", "site", "exclude")):
                raise SpecError(f"{name} must be a text, not {value!r}", field=name)
        if self.time is not None:
            parse_time(self.time)
        expand_hosts(self.exclude)
        smallest = {"nodes": 1, "spares": 0, "tasks_per_node": 1, "keep": 1}
        optional = {"cpus_per_task": 1, "gpus_per_node": 0, "copies": 0, "min_nodes": 1}
        for name, least in {**smallest, **optional}.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if type(value) is not int or value < least:
                raise SpecError(f"{name} must be a whole number of at least {least}, not {value!r}", field=name)
        if self.divergence not in get_args(ActOn):
            choices = ", ".join(get_args(ActOn))
            raise SpecError(f"divergence must be one of {choices}, not {self.divergence!r}", field="divergence")
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise SpecError(f"min_nodes ({self.min_nodes}) is more than nodes ({self.nodes})", field="min_nodes")
        if self.save_every != "auto" and (type(self.save_every) is not int or self.save_every < 1):
            raise SpecError(
                f"save_every must be a whole number of at least 1, or auto, not {self.save_every!r}", field="save_every"
            )
        if not re.fullmatch(r"\w[\w.+-]*", self.name):  # a leading - would be an option to sbatch, a leading . hides it
            raise SpecError(
                f"name {self.name!r}: use letters, digits and . _ + - only, and begin with a letter or digit",
                field="name",
            )
        if self.run_dir is not None and not self.run_dir.strip():
            raise SpecError("run_dir is empty; leave it out, or name a folder", field="run_dir")
        for name in ("start_deadline_s", "hang_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(f"{name} must be a number of seconds, more than 0, not {value!r}", field=name)
        if self.local and (self.nodes > 1 or self.spares):
            raise SpecError("local runs have one node and no spares: leave out nodes and spares", field="local")


@dataclass(frozen=True, slots=True)
class Submitted:
    """What was submitted, whole: the content of spec.json.

    Args:
        spec: the job spec.
        program: the program and its arguments; empty for a Python function, which submitit has pickled.
        cwd: folder that the program runs in.
        job_id: Slurm's id, "" before sbatch has answered.
        submitit: folder of submitit's files, "" when sbatch was called on a template.
        comment: the unique mark that the job carries in Slurm.
        version: of transom-hpc.
    """

    spec: JobSpec
    program: tuple[str, ...]
    cwd: str
    job_id: str = ""
    submitit: str = ""
    comment: str = ""
    version: str = ""

    def to_json(self) -> bytes:
        """The bytes of spec.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes, path: Path) -> Submitted:
        """Read spec.json.

        Raises:
            RunDirError: it is not one of ours; names the field.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise RunDirError(f"{path} can't be read: {error}", path=path) from error


_TEXTS = ("time", "name", "site", "mem", "partition", "account", "qos", "constraint", "exclude", "run_dir")
