"""The launcher's state machine: what to do next, decided from what happened. Pure: no clock, process, file or Slurm.

::

    STARTING ── Placed ──> LAUNCHING ── Progress ──> RUNNING
    LAUNCHING, RUNNING ── Exited badly ──> SETTLING ── HostBad | Probed ──> LAUNCHING | REQUEUEING | OVER
    LAUNCHING, RUNNING ── HostBad | Hung ──> LAUNCHING (on other hosts) | REQUEUEING | OVER
    LAUNCHING ── Unwatched, Probed ──> LAUNCHING (on other hosts) | REQUEUEING | OVER
    LAUNCHING, RUNNING ── StopAsked ──> STOPPING ── Exited | Expired ──> REQUEUEING | OVER
    REQUEUEING ── Requeued ──> OVER

Every event is defined in every phase; one that means nothing there changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from transom_hpc.tol.causes import Cause, Restart, tries_left
from transom_hpc.tol.events import (
    EXIT_NOT_SHARED,
    EXIT_STOPPED,
    Action,
    AskStop,
    End,
    Ending,
    Event,
    Exited,
    Expired,
    Finish,
    Host,
    HostBad,
    Hung,
    Isolated,
    Launch,
    Placed,
    Probe,
    Probed,
    Progress,
    Record,
    Requeue,
    Requeued,
    StopAsked,
    Unwatched,
    Wait,
)


class Phase(StrEnum):
    """Where the launcher is."""

    STARTING = "starting"
    LAUNCHING = "launching"
    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    REQUEUEING = "requeueing"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Limits:
    """Waits of the machine, in seconds.

    Args:
        settle_s: after a program's bad end, time for a verdict on a host to come.
        stop_s: from the request to the end of the program, before it is ended by force.
    """

    settle_s: float = 8.0
    stop_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """All that decisions are made from.

    Args:
        needed: hosts that the program runs on.
        home: the launcher's own host.
        active: hosts of the current launch, in order of rank.
        spares: healthy hosts that stand by.
        out: hosts taken out in this attempt.
        restarts: all restarts since the run was submitted, attempts before this one included.
        can_requeue: "" when the job may be requeued, else the reason why not.
    """

    phase: Phase
    needed: int
    home: str
    active: tuple[str, ...]
    spares: tuple[str, ...]
    out: tuple[Host, ...] = ()
    restarts: tuple[Restart, ...] = ()
    launch: int = 0
    step: int = 0
    committed: int = 0
    stop_cause: Cause | None = None
    exit_code: int = 0
    exit_who: str = ""
    can_requeue: str = ""
    limits: Limits = Limits()


Decision = tuple[Run, tuple[Action, ...]]


def decide(run: Run, event: Event) -> Decision:
    """What to do about an event.

    Returns:
        The run as it is now, and the actions to take, in order.
    """
    if run.phase is Phase.OVER:
        return run, ()
    match event:
        case Placed(misplaced):
            return _placed(run, misplaced) if run.phase is Phase.STARTING else (run, ())
        case Progress(step, committed):
            phase = Phase.RUNNING if run.phase is Phase.LAUNCHING else run.phase
            return replace(run, phase=phase, step=step, committed=max(committed, run.committed)), ()
        case Exited():
            return _exited(run, event)
        case HostBad():
            return _host_bad(run, event)
        case Hung(evidence, committed):
            if run.phase not in (Phase.LAUNCHING, Phase.RUNNING):
                return run, ()
            return _again(run, Restart(Cause.PROGRAM_HUNG, committed, evidence=evidence))
        case StopAsked(cause):
            return _stop_asked(run, cause)
        case Isolated(evidence):
            if run.phase is Phase.REQUEUEING:
                return run, ()
            return _over(run, Ending.LEFT, f"this host is cut off: {evidence}", 1, (End(),))
        case Expired():
            if run.phase is Phase.STOPPING:
                return _stopped(run)
            return run, ((Probe((*run.active, *run.spares)),) if run.phase is Phase.SETTLING else ())
        case Unwatched():
            return run, ((Probe((*run.active, *run.spares)),) if run.phase is Phase.LAUNCHING else ())
        case Probed(lost):
            if run.phase is Phase.LAUNCHING and not lost:
                return run, ()
            return _probed(run, lost) if run.phase in (Phase.LAUNCHING, Phase.SETTLING) else (run, ())
        case Requeued(ok, answer, cancelled):
            if run.phase is not Phase.REQUEUEING:
                return run, ()
            if cancelled:
                return _over(run, Ending.LEFT, answer, EXIT_STOPPED)
            if ok:
                return _over(run, Ending.LEFT, "requeued", 0)
            return _over(run, Ending.BADLY, f"the job could not be requeued: {answer}", run.exit_code or 1)


def _over(run: Run, ending: Ending, why: str, code: int, first: tuple[Action, ...] = ()) -> Decision:
    return replace(run, phase=Phase.OVER), (*first, Finish(ending, why, code))


def _placed(run: Run, misplaced: tuple[Host, ...]) -> Decision:
    bad = {host.name for host in misplaced}
    everybody = (*run.active, *run.spares)
    healthy = tuple(host for host in everybody if host not in bad)
    run = replace(run, out=misplaced)
    # The program must have a rank on the launcher's host: a stop request reaches it through that host's memory.
    if len(healthy) >= run.needed and run.home not in bad:
        return _launch(replace(run, active=healthy[: run.needed], spares=healthy[run.needed :]))
    names = ", ".join(sorted(bad)) or "too few hosts"
    restart = Restart(Cause.MISPLACED, run.committed, evidence=f"the job was started on {names}, which it was to avoid")
    return _requeue(run, restart)


def _launch(run: Run) -> Decision:
    run = replace(run, phase=Phase.LAUNCHING, launch=run.launch + 1)
    return run, (Launch(run.launch, run.active, run.spares),)


def _exited(run: Run, event: Exited) -> Decision:
    if run.phase not in (Phase.LAUNCHING, Phase.RUNNING, Phase.STOPPING):
        return run, ()
    run = replace(run, committed=max(event.committed, run.committed), exit_code=event.code, exit_who=event.who)
    if event.code == 0:
        return _over(run, Ending.WELL, "the program ended", 0)
    if run.phase is Phase.STOPPING:
        return _stopped(run)
    if event.code == EXIT_STOPPED:  # Slurm's signal went to the steps and not to us
        return _stopped(replace(run, stop_cause=Cause.TIME_LIMIT), "(not by the launcher)")
    if event.code == EXIT_NOT_SHARED:
        why = "a host does not see the run directory: put it on a file system that all hosts share"
        return _over(run, Ending.BADLY, why, event.code)
    # Nothing is ended here: the sidecar, whose verdict is waited for, goes on.
    return replace(run, phase=Phase.SETTLING), (Wait(run.limits.settle_s),)


def _host_bad(run: Run, event: HostBad) -> Decision:
    here = {*run.active, *run.spares} - {host.name for host in run.out}
    lost = {host.name: host for host in (Host(event.host, event.cause, event.evidence), *event.others)}
    bad = tuple(host for name, host in lost.items() if name in here)
    if run.home in {host.name for host in bad}:  # others would know better: a host that judges itself is cut off
        return decide(run, Isolated(lost[run.home].evidence))
    run = replace(
        run,
        out=(*run.out, *bad),
        spares=tuple(host for host in run.spares if host not in lost),
        committed=max(run.committed, event.committed),
    )
    blamed = next((host for host in bad if host.name in run.active), None)
    if run.phase not in (Phase.LAUNCHING, Phase.RUNNING, Phase.SETTLING):
        blamed = None
    notes = [Record("host out", _loss(run, host)) for host in bad if host is not blamed]
    if blamed is None:
        return run, tuple(notes)
    run, actions = _again(run, _loss(run, blamed))
    return run, (*notes, *actions)


def _loss(run: Run, host: Host) -> Restart:
    return Restart(host.cause, run.committed, host.name, host.evidence)


def _again(run: Run, restart: Restart) -> Decision:
    """Restart in the allocation where that is possible, else requeue, else stop for good."""
    run = replace(run, committed=max(run.committed, restart.committed))
    restart = replace(restart, committed=run.committed)
    if not tries_left(run.restarts, restart.cause, run.committed):
        return _no_progress(run, restart)
    bad = {host.name for host in run.out}
    survivors = [host for host in run.active if host not in bad]
    if len(survivors) + len(run.spares) < run.needed:
        return _requeue(run, restart)
    # A survivor keeps its rank; spares take the places of the lost.
    spares = list(run.spares)
    active = tuple(host if host not in bad else spares.pop(0) for host in run.active)
    run = replace(run, active=active, spares=tuple(spares), restarts=(*run.restarts, restart))
    run, actions = _launch(run)
    return run, (Record("restart", restart), End(), *actions)


def _no_progress(run: Run, restart: Restart) -> Decision:
    used = sum(1 for past in run.restarts if past.cause is restart.cause and past.committed == run.committed)
    since = f"step {run.committed}" if run.committed else "the start"
    why = (
        f"{restart.cause} came {used + 1} times without a new checkpoint since {since}"
        f"{': ' if restart.evidence else ''}{restart.evidence}. Look at the program's output, then submit again"
    )
    return _over(run, Ending.BADLY, why, run.exit_code or 1, (Record("gave up", restart), End()))


def _requeue(run: Run, restart: Restart) -> Decision:
    if not tries_left(run.restarts, restart.cause, run.committed):
        return _no_progress(run, restart)
    if run.can_requeue:
        why = f"{restart.cause} ({restart.evidence}), no spare is left, and {run.can_requeue}"
        return _over(run, Ending.BADLY, why, 1, (Record("gave up", restart), End()))
    run = replace(run, phase=Phase.REQUEUEING, restarts=(*run.restarts, restart))
    return run, (Record("restart", restart), End(), Requeue(restart.cause))


def _stop_asked(run: Run, cause: Cause) -> Decision:
    if run.phase in (Phase.STOPPING, Phase.REQUEUEING):
        return run, ()
    run = replace(run, stop_cause=cause)
    if run.phase in (Phase.STARTING, Phase.SETTLING):
        return _stopped(run)
    return replace(run, phase=Phase.STOPPING), (AskStop(cause), Wait(run.limits.stop_s))


def _stopped(run: Run, asked: str = "") -> Decision:
    if run.stop_cause is Cause.TIME_LIMIT:
        evidence = "the program did not leave by itself"
        if run.exit_code == EXIT_STOPPED:
            evidence = f"the program was asked to leave{' ' + asked if asked else ''}; step {run.committed} is saved"
        return _requeue(run, Restart(Cause.TIME_LIMIT, run.committed, evidence=evidence))
    why = "Slurm ends the job: preempted, cancelled or requeued"
    restart = Restart(run.stop_cause or Cause.TERMINATED, run.committed, evidence=why)
    return _over(run, Ending.LEFT, why, run.exit_code or EXIT_STOPPED, (Record("stopped", restart), End()))


def _probed(run: Run, lost: tuple[Host, ...]) -> Decision:
    names = {host.name for host in lost}
    run = replace(run, out=(*run.out, *lost), spares=tuple(host for host in run.spares if host not in names))
    blamed = next((host for host in lost if host.name in run.active), None)
    if run.home in names:  # its slurmd is gone: we run on, and nothing can be started beside us
        evidence = next(host.evidence for host in lost if host.name == run.home)
        run, actions = _requeue(run, Restart(Cause.HOST_LOST, run.committed, run.home, evidence))
    elif blamed is None and run.phase is Phase.LAUNCHING:  # spares alone: the program goes on
        actions = ()
    elif blamed is None:
        run, actions = _program_failed(run)
    else:
        run, actions = _again(run, _loss(run, blamed))
    notes = [Record("host out", _loss(run, host)) for host in lost if host is not blamed]
    return run, (*notes, *actions)


def _program_failed(run: Run) -> Decision:
    code, who = run.exit_code, f"{run.exit_who}: " if run.exit_who else ""
    if code > 128:
        return _again(run, Restart(Cause.PROGRAM_KILLED, run.committed, evidence=f"{who}died of signal {code - 128}"))
    return _again(run, Restart(Cause.PROGRAM_ERROR, run.committed, evidence=f"{who}exit status {code}"))
