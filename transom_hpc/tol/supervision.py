"""One launcher's life in its process: whether it takes over from another one, and what is left to do after its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import SlurmError
from transom_hpc.slurm.commands import Slurm, SlurmCommands
from transom_hpc.slurm.site import SiteConfig, load_site
from transom_hpc.tol.diary import Diary
from transom_hpc.tol.ending import end_job, is_alive
from transom_hpc.tol.events import Ending, Finish
from transom_hpc.tol.guard import supervisor
from transom_hpc.tol.job import Job, batch_environment
from transom_hpc.tol.journal import Entry, claim_exactly, newer_than
from transom_hpc.tol.launcher import Launcher
from transom_hpc.tol.leftovers import live_jobs
from transom_hpc.tol.result import write_result
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import Submitted
from transom_hpc.tol.succession import TakeOver, end_of_attempt, stand_by


def supervise(
    run: RunDir,
    submitted: Submitted,
    program: Sequence[str],
    job: Job,
    taken: TakeOver | None = None,
    killed: str = "",
) -> int:
    """Supervise the run in this process, to the end of this attempt.

    Args:
        run: the run directory.
        submitted: what was submitted.
        program: what to run where that is a Python function, which submitit knows how to call.
        job: this job; its home is this host.
        taken: the lost launcher that this one was started to replace, by a survivor, which has claimed the next
            attempt. There is no batch script any more then, and the end of the run must end the job.
        killed: why the launcher before this one on this host has ended, where it was killed.

    Returns:
        The exit status for who started it.
    """
    alone = taken is not None
    if killed:
        entries = run.entries()
        before = _attempt_of(entries, job)
        ended = end_of_attempt(entries, before)
        if ended is not None:  # it had done its work
            return _close(run, submitted, job, Finish(ended.ending, ended.why, ended.code), alone)
        if taken is not None and before <= taken.before:
            before = 0  # it had not begun
        if before:
            # One that was killed as soon as it had claimed the number has left it to us.
            if not claim_exactly(run.journal, before + 1, f"{job.home} {supervisor()}"):
                return stand_by(run, before, SystemClock())
            taken = TakeOver(before, evidence=killed)
    site = load_site(submitted.spec.site)
    slurm = SlurmCommands(ignore_term=True)
    environment = batch_environment(os.environ) if alone else dict(os.environ)
    environment["TRANSOM_LIVE_JOBS"] = live_jobs(slurm)
    if alone:
        _announce_the_limit(job, site, slurm)
    whole = replace(submitted, program=submitted.program or tuple(program))
    launcher = Launcher(run, whole, job, site, slurm, environment, taken=taken)
    launcher.run()
    return _close(run, submitted, job, launcher.finish, alone)


def _attempt_of(entries: Sequence[Entry], job: Job) -> int:
    """The newest attempt that a launcher on this host has begun in this life of the job; 0 for none. Pure."""
    mine = (str(job.job_id), job.restarts, job.home)
    found = [
        entry.attempt.number
        for entry in entries
        if entry.kind == "start" and (str(entry.facts.get("job_id")), entry.facts.get("requeues"), entry.host) == mine
    ]
    return max(found, default=0)


def _close(run: RunDir, submitted: Submitted, job: Job, finish: Finish, alone: bool) -> int:
    if submitted.submitit and submitted.program:
        try:
            write_result(submitted, job.job_id, finish)
        except OSError as error:  # the run has ended as it has, whether or not its result can be written
            Diary().say(f"the result for submitit could not be written: {error}")
    if alone:
        slurm = SlurmCommands(ignore_term=True)
        if finish.ending is not Ending.LEFT or _is_over(run, job, slurm):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's answer
            end_job(job, finish.code, slurm, SystemClock())
    return finish.code


def _is_over(run: RunDir, job: Job, slurm: Slurm) -> bool:
    """Whether this life of the job is over without Slurm knowing it: another job carries the run on."""
    if newer_than(run.journal, _attempt_of(run.entries(), job)):
        return False
    try:
        facts = slurm.show_job(job.job_id)
    except SlurmError:
        return False
    return is_alive(facts, job)


def _announce_the_limit(job: Job, site: SiteConfig, slurm: Slurm) -> None:
    """Be told before the job's time is up: Slurm's own signal goes to the batch script, which is gone."""
    try:
        end = time.mktime(time.strptime(slurm.show_job(job.job_id).end_time, "%Y-%m-%dT%H:%M:%S"))
    except (SlurmError, ValueError, OverflowError):  # no limit, or not known
        return
    wait_s = end - site.signal_lead_s - time.time()
    number = getattr(signal, f"SIG{site.signal}")
    timer = threading.Timer(max(1.0, wait_s), os.kill, (os.getpid(), number))
    timer.daemon = True
    if wait_s < threading.TIMEOUT_MAX:
        timer.start()
