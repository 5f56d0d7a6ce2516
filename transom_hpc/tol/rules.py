"""The rules of the state machine: each answers one kind of event, in the phases where `phases.TABLE` names it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transom_hpc.tol.causes import OF_THE_PROGRAM, Cause, Restart, pause_s, tries_left
from transom_hpc.tol.events import (
    EXIT_NOT_SHARED,
    EXIT_STOPPED,
    Action,
    AskStop,
    Distrust,
    Diverged,
    End,
    Ended,
    Ending,
    Exited,
    Expired,
    Finish,
    Host,
    HostBad,
    Hung,
    Isolated,
    Launch,
    Pause,
    Placed,
    Probe,
    Probed,
    Progress,
    Record,
    Requeue,
    Requeued,
    Restored,
    Stacks,
    StopAsked,
    Unwatched,
    Wait,
)
from transom_hpc.tol.state import Decision, Phase, Run


def _place(run: Run, event: Placed) -> Decision:
    bad = {host.name for host in event.misplaced}
    healthy = tuple(host for host in (*run.active, *run.spares) if host not in bad)
    run = replace(run, out=event.misplaced)
    # The program must have a rank on the launcher's host: a stop request reaches it through that host's memory.
    if len(healthy) >= run.fewest and run.home not in bad:
        return _launch(replace(run, active=healthy[: run.needed], spares=healthy[run.needed :]))
    names = ", ".join(sorted(bad)) or "too few hosts"
    restart = Restart(Cause.MISPLACED, run.committed, evidence=f"the job was started on {names}, which it was to avoid")
    return _requeue(run, restart)


def _begin(run: Run, event: Restored) -> Decision:
    return replace(run, restored=event.step, step=event.step), ()


def _go_on(run: Run, event: Progress) -> Decision:
    saved = event.committed > run.committed
    run = replace(_reach(run, event), phase=Phase.RUNNING)
    doubtful = next((host for host in run.doubtful if host.name in run.active), None)
    if not saved or doubtful is None or not run.spares:
        return run, ()
    bad = HostBad(doubtful.name, doubtful.cause, doubtful.evidence, run.committed)
    return _replace(replace(run, doubtful=tuple(host for host in run.doubtful if host is not doubtful)), bad)


def _note(run: Run, event: Progress) -> Decision:
    return _reach(run, event), ()


def _exit(run: Run, event: Exited) -> Decision:
    run = _ended(run, event)
    if event.code == 0:
        return _over(run, Ending.WELL, "the program ended", 0)
    if event.code == EXIT_STOPPED:  # Slurm's signal went to the steps and not to us
        return _stopped(replace(run, stop_cause=Cause.TIME_LIMIT), "(not by the launcher)")
    if event.code == EXIT_NOT_SHARED:
        why = "a host does not see the run directory: put it on a file system that all hosts share"
        return _over(run, Ending.BADLY, why, event.code)
    # Nothing is ended here: the sidecar, whose verdict is waited for, goes on.
    return replace(run, phase=Phase.SETTLING), (Wait(run.limits.settle_s),)


def _leave(run: Run, event: Exited) -> Decision:
    run = _ended(run, event)
    return _over(run, Ending.WELL, "the program ended", 0) if event.code == 0 else _stopped(run)


def _lose(run: Run, event: HostBad) -> Decision:
    """Hosts are lost, and nothing is started just now."""
    if event.can_wait:
        return run, ()
    run, bad = _take_out(run, event)
    own = next((host for host in bad if host.name == run.home), None)
    if own is not None and own.cause in _NOT_HEARD:
        return _isolate(run, Isolated(own.evidence))
    return run, tuple(Record("host out", _loss(run, host)) for host in bad)


def _replace(run: Run, event: HostBad) -> Decision:
    if event.can_wait:  # it works, and slower than the others: only a spare is better
        known = {host.name for host in (*run.doubtful, *run.out)}
        doubt = Host(event.host, event.cause, event.evidence)
        return (run if event.host in known else replace(run, doubtful=(*run.doubtful, doubt))), ()
    run, bad = _take_out(run, event)
    own = next((host for host in bad if host.name == run.home), None)
    if own is not None and own.cause in _NOT_HEARD:  # others would know better: who judges itself so is cut off
        return _isolate(run, Isolated(own.evidence))
    if own is not None:
        return _requeue(run, _loss(run, own))
    blamed = next((host for host in bad if host.name in run.active), None)
    notes = [Record("host out", _loss(run, host)) for host in bad if host is not blamed]
    if blamed is None:
        return run, tuple(notes)
    run, actions = _again(run, _loss(run, blamed))
    return run, (*notes, *actions)


def _hang(run: Run, event: Hung) -> Decision:
    run, actions = _again(run, _restart(run, Cause.PROGRAM_HUNG, event.committed, event.evidence))
    return run, (Stacks(run.active), *actions)


def _diverge(run: Run, event: Diverged) -> Decision:
    committed = max(event.committed, run.committed)
    if event.before:  # what was saved since is no progress, and refills no budget
        committed = min(committed, event.before - 1)
        run = replace(run, committed=committed)
    run, actions = _again(run, _restart(run, Cause.DIVERGED, committed, event.evidence))
    if event.before and not any(isinstance(action, Distrust) for action in actions):
        actions = (Distrust(event.before, event.evidence), *actions)
    return run, actions


def _stop(run: Run, event: StopAsked) -> Decision:
    """There is nothing to save."""
    return _stopped(replace(run, stop_cause=event.cause))


def _ask(run: Run, event: StopAsked) -> Decision:
    run = replace(run, stop_cause=event.cause, phase=Phase.STOPPING)
    return run, (AskStop(event.cause), Wait(run.limits.stop_s))


def _insist(run: Run, event: StopAsked) -> Decision:
    """A person who stops the run means more than a time limit that is near."""
    return (replace(run, stop_cause=event.cause) if event.cause is Cause.STOPPED else run), ()


def _give_way(run: Run, event: StopAsked) -> Decision:
    return _over(run, Ending.LEFT, f"{event.cause}, while another launcher leads", EXIT_STOPPED)


def _isolate(run: Run, event: Isolated) -> Decision:
    restart = Restart(Cause.HOST_SILENT, run.committed, run.home, event.evidence)
    return replace(run, phase=Phase.ASIDE), (Record("standing by", restart), End(), Wait(run.limits.aside_s))


def _probe(run: Run, _event: Expired | Unwatched) -> Decision:
    return run, (Probe((*run.active, *run.spares)),)


def _start(run: Run, _event: Expired) -> Decision:
    return _launch(run)


def _stop_hard(run: Run, _event: Expired) -> Decision:
    return _stopped(run)


def _come_back(run: Run, _event: Expired) -> Decision:
    """Nobody has taken over, and this host lives: the job is worth asking for."""
    why = "this host was cut off, its program was ended, and no other launcher took over"
    return _requeue(run, Restart(Cause.LAUNCHER_LOST, run.committed, evidence=why))


def _sift(run: Run, event: Probed) -> Decision:
    """Hosts were tried while the program starts."""
    return _probed(run, event.lost) if event.lost else (run, ())


def _blame(run: Run, event: Probed) -> Decision:
    """Hosts were tried after the program ended badly."""
    return _probed(run, event.lost)


def _answer(run: Run, event: Requeued) -> Decision:
    if event.cancelled:
        return _over(run, Ending.LEFT, event.answer, EXIT_STOPPED)
    if event.ok:
        return _over(run, Ending.LEFT, event.answer or "requeued", 0)
    why = f"the job could not be requeued: {event.answer}"
    return _over(run, Ending.BADLY, why, (run.exit.code if run.exit else 0) or 1)


def _follow(run: Run, event: Ended) -> Decision:
    return _over(run, Ending.LEFT, f"another launcher led to the end: {event.ending}, {event.why}", event.code)


# What rules have in common

_NOT_HEARD = (Cause.HOST_SILENT, Cause.HOST_LOST)


def _over(run: Run, ending: Ending, why: str, code: int, first: tuple[Action, ...] = ()) -> Decision:
    return replace(run, phase=Phase.OVER), (*first, Finish(ending, why, code))


def _reach(run: Run, event: Progress) -> Run:
    return replace(run, step=event.step, committed=max(event.committed, run.committed))


def _ended(run: Run, event: Exited) -> Run:
    return replace(run, committed=max(event.committed, run.committed), exit=event)


def _restart(run: Run, cause: Cause, committed: int, evidence: str) -> Restart:
    highest = max(committed, run.committed)
    return Restart(cause, highest, evidence=evidence, step=run.step, restored=run.restored)


def _loss(run: Run, host: Host) -> Restart:
    return Restart(host.cause, run.committed, host.name, host.evidence, run.step, run.restored)


def _launch(run: Run) -> Decision:
    run = replace(run, phase=Phase.LAUNCHING, launch=run.launch + 1, restored=0)
    return run, (Launch(run.launch, run.active, run.spares),)


def _take_out(run: Run, event: HostBad) -> tuple[Run, tuple[Host, ...]]:
    """The run without the hosts that an event names, and those of them that it had."""
    here = {*run.active, *run.spares} - {host.name for host in run.out}
    named = {host.name: host for host in (Host(event.host, event.cause, event.evidence), *event.others)}
    bad = tuple(host for name, host in named.items() if name in here)
    spares = tuple(host for host in run.spares if host not in named)
    out = (*run.out, *(host for host in bad if host.name != run.home or host.cause not in _NOT_HEARD))
    return replace(run, out=out, spares=spares, committed=max(run.committed, event.committed)), bad


def _again(run: Run, restart: Restart) -> Decision:
    """Restart in the allocation where that is possible, else requeue, else stop for good."""
    run = replace(run, committed=restart.committed)
    if not tries_left(run.restarts, restart.cause, run.committed):
        return _no_progress(run, restart)
    bad = {host.name for host in run.out}
    survivors = [host for host in run.active if host not in bad]
    if len(survivors) + len(run.spares) < run.fewest:
        return _requeue(run, restart)
    # A survivor keeps its rank; spares take the places of the lost, as far as there are any.
    spares = list(run.spares)
    places = [host if host not in bad else (spares.pop(0) if spares else "") for host in run.active]
    active = tuple(host for host in places if host)
    while spares and len(active) < run.needed:  # it had to run on fewer for a while
        active = (*active, spares.pop(0))
    wait = pause_s(run.restarts, restart.cause, run.committed)
    doubt = _distrust(run, restart)
    run = replace(run, active=active, spares=tuple(spares), restarts=(*run.restarts, restart))
    first: tuple[Action, ...] = (Record("restart", restart), *doubt, End())
    if wait:
        return replace(run, phase=Phase.PAUSING), (*first, Pause(restart.cause, wait))
    run, actions = _launch(run)
    return run, (*first, *actions)


def _distrust(run: Run, restart: Restart) -> tuple[Distrust, ...]:
    """A checkpoint after which the program has died early twice in a row is not used a third time."""

    def early(one: Restart) -> bool:
        return one.cause in OF_THE_PROGRAM and one.restored > 0 and one.step - one.restored <= run.early

    before = next((one for one in reversed(run.restarts) if one.cause in OF_THE_PROGRAM), None)
    if before is None or not early(before) or not early(restart) or before.restored != restart.restored:
        return ()
    evidence = f"the program began from step {restart.restored} twice and died within {run.early} steps"
    return (Distrust(restart.restored, evidence),)


def _no_progress(run: Run, restart: Restart) -> Decision:
    used = sum(1 for past in run.restarts if past.cause is restart.cause and past.committed == run.committed)
    since = f"step {run.committed}" if run.committed else "the start"
    why = (
        f"{restart.cause} came {used + 1} times without a new checkpoint since {since}"
        f"{': ' if restart.evidence else ''}{restart.evidence}. {_REMEDY.get(restart.cause, _LOOK)}, then submit again"
    )
    return _over(run, Ending.BADLY, why, (run.exit.code if run.exit else 0) or 1, (Record("gave up", restart), End()))


_LOOK = "Look at the program's output"
_REMEDY = {
    Cause.OUT_OF_MEMORY: "Ask for more memory (--mem), or let each rank hold less",
    Cause.PROGRAM_HUNG: "See the stacks in the run directory's logs",
    Cause.DIVERGED: "Look at the losses, and go on from an older checkpoint with other settings",
    Cause.STORAGE: "See whether the run directory's file system is full or away",
    Cause.TIME_LIMIT: "Save more often (--save-every), or ask for more time",
}


def _requeue(run: Run, restart: Restart) -> Decision:
    if not tries_left(run.restarts, restart.cause, run.committed):
        return _no_progress(run, restart)
    run = replace(run, phase=Phase.REQUEUEING, restarts=(*run.restarts, restart))
    return run, (Record("restart", restart), End(), Requeue(restart.cause, follow_up=bool(run.can_requeue)))


def _stopped(run: Run, asked: str = "") -> Decision:
    cause = run.stop_cause or Cause.TERMINATED
    left = run.exit is not None and run.exit.code == EXIT_STOPPED
    if cause in (Cause.TIME_LIMIT, Cause.REQUEUED):
        evidence = "the program did not leave by itself"
        if left:
            evidence = f"the program was asked to leave{' ' + asked if asked else ''}; step {run.committed} is saved"
        elif run.phase is not Phase.STOPPING:
            evidence = "no program was running"
        return _requeue(run, Restart(cause, run.committed, evidence=evidence, step=run.step))
    if cause is Cause.STOPPED:
        why = f"stopped by a person; step {run.committed} is saved. To go on: transom submit with the same --run-dir"
        restart = Restart(cause, run.committed, evidence=why, step=run.step)
        return _over(run, Ending.STOPPED, why, EXIT_STOPPED, (Record("stopped", restart), End()))
    why = "Slurm ends the job: preempted, cancelled or requeued"
    restart = Restart(cause, run.committed, evidence=why, step=run.step)
    code = run.exit.code if run.exit else 0
    return _over(run, Ending.LEFT, why, code or EXIT_STOPPED, (Record("stopped", restart), End()))


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
        assert run.exit is not None
        run, actions = _again(run, _restart(run, run.exit.cause, run.committed, run.exit.evidence))
    else:
        run, actions = _again(run, _loss(run, blamed))
    notes = [Record("host out", _loss(run, host)) for host in lost if host is not blamed]
    return run, (*notes, *actions)


RULES: dict[str, Callable[[Run, Any], Decision]] = {
    "place": _place,
    "begin": _begin,
    "go_on": _go_on,
    "note": _note,
    "exit": _exit,
    "leave": _leave,
    "lose": _lose,
    "replace": _replace,
    "hang": _hang,
    "diverge": _diverge,
    "stop": _stop,
    "ask": _ask,
    "insist": _insist,
    "give_way": _give_way,
    "isolate": _isolate,
    "probe": _probe,
    "launch": _start,
    "stop_hard": _stop_hard,
    "come_back": _come_back,
    "sift": _sift,
    "blame": _blame,
    "answer": _answer,
    "follow": _follow,
}
"""The rules by their names in the table."""
