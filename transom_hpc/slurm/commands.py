"""Slurm's programs: the only place that runs them.

Owns their arguments, their environment, their deadline and what their answers mean. Never decides anything.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from transom_hpc.base.errors import SlurmError, SlurmMissing, SlurmRefused, SlurmUnreachable
from transom_hpc.slurm.environment import clean_environment
from transom_hpc.slurm.hosts import fold_hosts
from transom_hpc.slurm.text import (
    SACCT_FIELDS,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    US,
    AccountRow,
    JobFacts,
    NodeRow,
    QueueRow,
    parse_sacct,
    parse_show_job,
    parse_sinfo,
    parse_squeue,
)


class Slurm(Protocol):
    """What the other parts need of Slurm.

    All methods raise SlurmMissing (no Slurm here), SlurmUnreachable (no answer: unknown) or SlurmRefused (the answer
    is no), and wait no longer than the timeout given to the implementation, times the questions they need.
    """

    def queue(self, job_ids: Sequence[int] | None = None) -> list[QueueRow]:
        """Jobs in the queue, in one call.

        Args:
            job_ids: which; None: all of mine. One that is not in the queue is just absent.
        """

    def accounting(self, job_ids: Sequence[int], *, duplicates: bool = True) -> list[AccountRow]:
        """Jobs and their steps in the accounting, in one call, oldest first.

        Args:
            job_ids: which; one that is not there is just absent.
            duplicates: every life of a requeued job, not only its last.

        Raises:
            SlurmRefused: this cluster keeps no accounting.
        """

    def show_job(self, job_id: int) -> JobFacts:
        """What the controller knows of one job.

        Raises:
            SlurmRefused: it knows no such job (it forgets a job minutes after its end).
        """

    def nodes(self, hosts: Sequence[str] | None = None, *, partition: str = "") -> list[NodeRow]:
        """Nodes of the cluster, or of one or several partitions ("a,b").

        Args:
            hosts: which; one that Slurm does not know is just absent. None: all.
            partition: "" for all.
        """

    def partitions(self) -> list[str]:
        """Names of all partitions."""

    def requeue(self, job_id: int) -> None:
        """End this life of a job and put it back into the queue."""

    def exclude(self, job_id: int, hosts: Sequence[str]) -> list[str]:
        """Make `hosts` the list of nodes that a pending job avoids, in place of the one it has.

        Returns:
            Those of `hosts` that are no nodes of the cluster, and are left out for that reason.

        Raises:
            SlurmRefused: the job is not pending, or the list read back lacks one of the others.
        """

    def release_now(self, job_id: int) -> None:
        """Let a pending job that waits for its begin time start now."""

    def cancel(self, job_id: int) -> None:
        """End a job. One that has ended already is left alone."""

    def signal_step(self, job_id: int, step: int | str, signal_name: str) -> None:
        """Send a signal to the tasks of a step, or with step 'batch' to the batch script alone."""

    def script(self, job_id: int) -> str:
        """The batch script of a job of mine.

        Raises:
            SlurmRefused: it has none (salloc), or Slurm does not know the job any more.
        """

    def submit(
        self, options: Sequence[str], script: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        """Submit a batch script; the job's id.

        Args:
            options: of sbatch.
            script: whose text Slurm keeps.
            arguments: of the script.
            environment: what the job inherits.

        Raises:
            SlurmUnreachable: no answer; the job may be there all the same.
        """

    def version(self) -> str:
        """'22.05.8'."""


# Times in one format, array expressions whole, messages in English.
_ANSWERS = {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}

_UNREACHABLE = re.compile(
    r"unable to contact|socket timed out|connect failure|connection refused|connection failure|zero bytes were trans"
    r"|unable to (connect to|establish)|could not establish|problem talking to|error talking to|standby mode"
    r"|no route to host|network is unreachable|temporarily unable|configuration source|munge|authentication"
    r"|insane message|unexpected message|timed out|header lengths are longer|slurmdbd",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"invalid|no longer pending|pending execution|presently disabled|only batch jobs|denied|not permitted"
    r"|storage is disabled|already (comp|fin)|node name|not supported|unknown job|no such|duplicate|not running",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_ENDED_JOB = re.compile(r"invalid job id|already comp", re.IGNORECASE)

# The signals by which Slurm, a person or a terminal ends or pokes every process of a job.
_JOB_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
)

_SHIELD = f"""
import os, signal, sys
for number in {sorted(int(one) for one in _JOB_SIGNALS)}:
    signal.signal(number, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class SlurmCommands:
    """Slurm, through its programs.

    Args:
        timeout_s: for each program; then it is killed and the state is unknown.
        ignore_term: start the programs so that SIGTERM (and INT, HUP, USR1, USR2…) does not end them: inside a job
            that is being requeued, Slurm signals every process, and `scontrol` must outlive that.
    """

    def __init__(self, timeout_s: float = 20.0, *, ignore_term: bool = False) -> None:
        self._timeout_s = timeout_s
        self._ignore_term = ignore_term

    def queue(self, job_ids: Sequence[int] | None = None) -> list[QueueRow]:
        command = ["squeue", "-o", SQUEUE_FORMAT]
        if job_ids is None:
            return parse_squeue(self._ask([*command, f"--user={os.getuid()}"]))
        if not job_ids:
            return []
        try:
            return parse_squeue(self._ask([*command, f"--jobs={_numbers(job_ids)}"]))
        except SlurmRefused as refusal:
            # A single unknown job is an error to squeue, several are not.
            if not _UNKNOWN_JOB.search(refusal.answer):
                raise
            return []

    def accounting(self, job_ids: Sequence[int], *, duplicates: bool = True) -> list[AccountRow]:
        if not job_ids:
            return []
        command = ["sacct", "--parsable2", f"--delimiter={US}", f"--format={SACCT_FIELDS}"]
        command += ["--duplicates"] if duplicates else []
        return parse_sacct(self._ask([*command, f"--jobs={_numbers(job_ids)}"]))

    def show_job(self, job_id: int) -> JobFacts:
        facts = parse_show_job(self._ask(["scontrol", "show", "job", str(job_id)]))
        # Of a job array, scontrol shows the pending rest and each task: the one that has the number itself.
        for job in facts:
            if job.job_id == job_id:
                return job
        return facts[0]

    def nodes(self, hosts: Sequence[str] | None = None, *, partition: str = "") -> list[NodeRow]:
        command = ["sinfo", "--all", "-N", "-o", SINFO_FORMAT]
        command += [f"--partition={partition}"] if partition else []
        if hosts is None:
            return parse_sinfo(self._ask(command))
        if not hosts:
            return []
        return parse_sinfo(self._ask([*command, f"--nodes={fold_hosts(hosts)}"]))

    def partitions(self) -> list[str]:
        command = ["sinfo", "--all", "-o", "%R"]
        lines = self._ask(command).split()
        if lines[:1] != ["PARTITION"]:
            raise SlurmUnreachable("sinfo gave an empty answer: ask again later", command="sinfo", answer="")
        return list(dict.fromkeys(lines[1:]))

    def requeue(self, job_id: int) -> None:
        self._tell(["scontrol", "requeue", str(job_id)])

    def exclude(self, job_id: int, hosts: Sequence[str]) -> list[str]:
        wanted, dropped = list(dict.fromkeys(hosts)), list[str]()
        try:
            self._write_excluded(job_id, wanted)
        except SlurmRefused as refusal:
            # One unknown name rejects the whole list (22.05: "Invalid node name specified").
            if "node name" not in refusal.answer.lower():
                raise
            known = {row.host for row in self.nodes(wanted)}
            dropped = [host for host in wanted if host not in known]
            if not dropped:
                raise
            wanted = [host for host in wanted if host in known]
            if not wanted:
                return dropped
            self._write_excluded(job_id, wanted)
        # That it was accepted proves nothing: while the job runs, an unchanged list is accepted too.
        there = self.show_job(job_id).exc_hosts
        lacking = sorted(set(wanted) - set(there))
        if lacking:
            raise SlurmRefused(
                f"job {job_id} does not exclude {fold_hosts(lacking)} although Slurm accepted it",
                command="scontrol update",
                code=0,
                answer=f"ExcNodeList={fold_hosts(there)}",
                job=job_id,
            )
        return dropped

    def release_now(self, job_id: int) -> None:
        self._tell(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])

    def cancel(self, job_id: int) -> None:
        try:
            self._tell(["scancel", str(job_id)])
        except SlurmRefused as refusal:
            if not _ENDED_JOB.search(refusal.answer):
                raise

    def signal_step(self, job_id: int, step: int | str, signal_name: str) -> None:
        name = signal_name.removeprefix("SIG")
        where = ["--batch", str(job_id)] if step == "batch" else [f"{job_id}.{step}"]
        self._tell(["scancel", f"--signal={name}", *where])

    def script(self, job_id: int) -> str:
        return self._ask(["scontrol", "write", "batch_script", str(job_id), "-"])

    def submit(
        self, options: Sequence[str], script: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        code, output, complaint = self._run(command, environment)
        if code != 0:
            raise _failure(command, code, complaint or output, otherwise=SlurmRefused)
        found = re.findall(r"^([0-9]+)(?:;\S+)?$", output, re.MULTILINE)  # with several clusters: 123;name
        if not found:
            raise SlurmUnreachable(f"sbatch printed {output!r}", command=_line(command), code=code, answer=output)
        return int(found[-1])

    def version(self) -> str:
        answer = self._ask(["squeue", "--version"])
        found = re.search(r"[0-9]+(?:\.[0-9]+)+\S*", answer)
        if not found:
            raise SlurmUnreachable(f"squeue --version printed {answer!r}", command="squeue --version", answer=answer)
        return found[0]

    def _write_excluded(self, job_id: int, hosts: Sequence[str]) -> None:
        self._tell(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={fold_hosts(hosts)}"])

    def _ask(self, command: Sequence[str]) -> str:
        """Standard output of a program that only reads: what it says beyond a refusal we know is no answer."""
        code, output, complaint = self._run(command)
        if code == 0 and (output.strip() or not complaint.strip()):
            return output
        raise _failure(command, code, complaint or output, otherwise=SlurmUnreachable)

    def _tell(self, command: Sequence[str]) -> None:
        code, output, complaint = self._run(command)
        if code != 0:
            raise _failure(command, code, complaint or output, otherwise=SlurmError)
        # scancel's exit status is 0 although it was refused.
        if _REFUSED.search(complaint) and "error" in complaint.lower():
            raise _failure(command, code, complaint, otherwise=SlurmError)

    def _run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """Exit status, output and complaint of one program, within the timeout; nothing of it is left behind."""
        if not shutil.which(command[0]):
            raise SlurmMissing(
                f"no Slurm on this machine: {command[0]} not found; load Slurm's module or go to a login node",
                command=command[0],
            )
        try:
            process = self._spawn(command, environment or clean_environment(os.environ) | _ANSWERS)
        except OSError as error:
            raise SlurmUnreachable(f"{command[0]} can't be started: {error}", command=_line(command)) from error
        try:
            output, complaint = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise SlurmUnreachable(
                f"{command[0]} gave no answer in {self._timeout_s:g} s: the state is unknown, ask again later",
                command=_line(command),
                answer="",
            ) from error
        except BaseException:
            _end(process)
            raise
        return process.returncode, output, complaint

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        # A blocked signal stays blocked over fork and exec, is a matter of this thread alone, and holds from the
        # child's first instruction: there is no moment in which it is unprotected. (SIG_IGN belongs to the whole
        # process and is the main thread's to set; a handler is not inherited; a session of its own does not help, as
        # Slurm signals every process of the job.) But a shell may unblock it, and at some sites `scontrol` is a shell
        # script: so the child, protected, then sets SIG_IGN, which no shell takes back, and becomes the program.
        shield = [sys.executable, "-I", "-S", "-c", _SHIELD] if self._ignore_term else []
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS if shield else ())
        try:
            return subprocess.Popen(
                [*shield, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                encoding="utf-8",
                errors="replace",
                process_group=0,  # so that what it started goes with it
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        # Unkillable for now (it hangs in a dead file system): a thread reaps it whenever it goes.
        threading.Thread(target=process.wait, daemon=True).start()


def _failure(command: Sequence[str], code: int, answer: str, *, otherwise: type[SlurmError]) -> SlurmError:
    answer = answer.strip()
    kind = otherwise
    if code < 0 or not answer or _UNREACHABLE.search(answer):
        kind = SlurmUnreachable
    elif _REFUSED.search(answer):
        kind = SlurmRefused
    if code < 0:
        answer = answer or f"ended by signal {-code}"
    # The last line is the reason; what stands before it is how Slurm got there.
    reason = answer.splitlines()[-1] if answer else "no answer"
    return kind(f"{' '.join(command[:2])}: {reason}", command=_line(command), code=code, answer=answer)


def _line(command: Sequence[str]) -> str:
    return shlex.join(command)


def _numbers(job_ids: Sequence[int]) -> str:
    return ",".join(str(job_id) for job_id in dict.fromkeys(job_ids))
