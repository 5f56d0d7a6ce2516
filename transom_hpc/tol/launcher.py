"""The launcher: the job's supervisor, on its first host. It gathers events, asks `phases` what to do, and does it.

It runs in the batch script. It holds no decision of its own: each is made in `phases`, `hang`, `exclusion` or `causes`.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import LaunchError
from transom_hpc.monitors import verdict
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.hosts import fold_hosts
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol import events, exits, phases, requests, state, succession
from transom_hpc.tol.admission import misplaced, refuse_where_wrong, why_no_requeue
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause, Restart
from transom_hpc.tol.diary import Diary
from transom_hpc.tol.divergence import Losses
from transom_hpc.tol.hang import START_DEADLINE_S, HangWatch
from transom_hpc.tol.history import restarts_of_job
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Journal, begun_after, claim_number, newer_than
from transom_hpc.tol.keeper import Keeper
from transom_hpc.tol.memory import tell
from transom_hpc.tol.pace import Pace
from transom_hpc.tol.requeueing import carry_on, why_ended
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import Submitted
from transom_hpc.tol.steps import Step, Steps, ended_well, first_exit, has_begun
from transom_hpc.tol.variables import program_variables
from transom_hpc.tol.watcher import Watcher

_TICK_S = 0.2
_ASK_S = 1.0  # between two looks for a request
_LOOK_S = 3.0


class Launcher:
    """Runs a program on a job's hosts until it has ended, or the job is to be requeued.

    Args:
        run: the run directory.
        submitted: what was submitted.
        job: the Slurm job.
        site: the site config.
        slurm: Slurm's commands.
        environment: what the program inherits.
        clock: time.
        taken: the launcher that this one takes over from; None: it starts the run, or a new life of its job.
    """

    def __init__(
        self,
        run: RunDir,
        submitted: Submitted,
        job: Job,
        site: SiteConfig,
        slurm: Slurm,
        environment: Mapping[str, str],
        clock: Clock | None = None,
        taken: succession.TakeOver | None = None,
    ) -> None:
        self._taken = taken
        self._dir = run
        self._submitted = submitted
        self._job = job
        self._site = site
        self._slurm = slurm
        self._environment = environment
        self._clock = clock or SystemClock()
        self._steps = Steps(job, site, environment)
        self._signals: list[int] = []
        self._program: Step | None = None
        self._watcher = Watcher(self._steps, job, site, run, self._monitoring_problem, self._clock)
        spec = submitted.spec
        self._keeper = Keeper(
            self._steps,
            job,
            site,
            run,
            self._server_problem,
            self._clock,
            spec.tasks_per_node,
            site.copies if spec.copies is None else spec.copies,
        )
        self._deadline: float | None = None
        self._ask_at = 0.0  # when to look next for a person's request
        self._look_at = 0.0  # when to look next whether another launcher leads, and to which end
        self._attempt = Attempt(0, 0)
        self._diary = Diary()
        self._seen_committed = 0
        self._distrust = ""  # "STEP@ATTEMPT": not to be restored
        self._losses = Losses(spec.divergence)
        self._pace = self._new_pace()
        self.finish = events.Finish(events.Ending.LEFT, "not started", 1)
        """How the work ended; set by run."""

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            The exit status for the batch script.

        Raises:
            LaunchError: the run can't be started: another job holds the directory, or it was stopped for good.
        """
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        for name in {self._site.signal, "INT"}:
            signal.signal(getattr(signal, f"SIG{name}"), self._on_signal)
        try:
            return self._run()
        finally:
            self._end()
            signal.signal(signal.SIGTERM, previous)

    # Start

    def _run(self) -> int:
        entries = self._dir.entries()
        refuse_where_wrong(self._dir, entries, self._job, self._slurm)
        taken = self._taken
        number = claim_number(self._dir.journal) if taken is None else taken.before + 1
        self._diary = Diary(Journal(self._dir.journal, number, self._job.home, self._clock))
        self._attempt = Attempt(number, 0)
        spec = self._submitted.spec
        needed = spec.nodes
        hosts = (self._job.home, *(host for host in self._job.hosts if host != self._job.home))
        estate = succession.Estate(hosts[:needed], hosts[needed:], ())
        if taken is not None:
            estate = succession.estate(entries, taken, self._job)
            hosts = estate.living
        distrusted = [entry.facts for entry in entries if entry.kind == "distrust"]
        if distrusted:
            self._distrust = self._keeper.distrust = f"{distrusted[-1].get('below')}@{distrusted[-1].get('upto')}"
        settle_s = self._site.sample_period_s * self._site.silent_periods + 1.5
        self._state = state.Run(
            phase=state.Phase.STARTING,
            needed=needed,
            home=self._job.home,
            active=estate.active,
            spares=estate.spares,
            least=needed if spec.min_nodes is None else spec.min_nodes,
            restarts=restarts_of_job(entries, str(self._job.job_id)),
            committed=self._committed(),
            early=2 if spec.save_every == "auto" else max(2, spec.save_every // 10),
            can_requeue=why_no_requeue(self._job, self._slurm),
            limits=state.Limits(settle_s=settle_s, stop_s=self._leave_s),
        )
        self._record(
            "start",
            job_id=self._job.job_id,
            requeues=self._job.restarts,
            hosts=list(hosts),
            needed=needed,
            home=self._job.home,
            committed=self._state.committed,
            can_requeue=self._state.can_requeue,
            ended_by=why_ended(entries, self._job, self._slurm) or "",
            succeeds=str(Attempt(taken.before, 0)) if taken else "",
            program=list(self._submitted.program),
        )
        spare = max(0, len(hosts) - needed)
        self._say(f"attempt {number} of run {self._dir.path} on {fold_hosts(hosts)}, {spare} of them spare")
        if taken is not None:
            finish = self._handle(self._take_over(taken, estate))
        elif len(hosts) < self._state.least:
            raise LaunchError(
                f"the job has {len(hosts)} nodes and the program needs {self._state.least}", run=self._dir.path
            )
        else:
            finish = self._handle(events.Placed(misplaced(entries, self._job, self._clock.wall())))
        while finish is None:
            finish = self._turn()
        return self._close(finish)

    def _take_over(self, taken: succession.TakeOver, estate: succession.Estate) -> events.Probed:
        """End what the lost launcher has left on the living hosts; what goes on is decided as after a fault here."""
        self._say(f"takes over from attempt {taken.before}: {taken.evidence}")
        exited = events.Exited(1, self._state.committed, Cause.LAUNCHER_LOST, taken.evidence)
        self._state = replace(self._state, phase=state.Phase.SETTLING, exit=exited)
        lost = [events.Host(host, Cause.HOST_SILENT, taken.evidence) for host in estate.lost]
        for host, evidence in succession.clear(self._steps, estate.living, self._job.shm).items():
            lost.append(events.Host(host, Cause.HOST_LOST, evidence))
        return events.Probed(tuple(lost))

    # The loop

    def _turn(self) -> events.Finish | None:
        for event in self._events():
            finish = self._handle(event)
            if finish is not None:
                return finish
        return None

    def _events(self) -> list[events.Event]:
        if self._state.phase is state.Phase.ASIDE:
            return self._events_aside()
        found: list[events.Event] = []
        self._keeper.look()
        for news in self._keeper.news():
            found += tell(news, self._record, self._say)
        messages = self._watcher.messages(_TICK_S)
        if messages:
            self._pace.heard()
        if any(isinstance(message, verdict.Verdict) for message in messages):
            # Hosts that lose their power together fall silent within a ping of each other: start again once, not twice.
            until = self._clock.now() + self._site.sample_period_s / 2
            while self._clock.now() < until:
                messages += self._watcher.messages(_TICK_S)
        for message in messages:
            found.extend(self._from_sidecar(message))
        found = events.together(found)
        if self._watcher.unheard():
            found.append(events.Unwatched())
        if self._program is not None:
            found.extend(self._pace.look())
        found += [*self._signalled(), *self._requested()]
        if self._program is not None:
            code = self._program.poll()
            hung = [event for event in found if isinstance(event, events.Hung)]
            if code is None and hung and first_exit(self._dir.logs / str(self._attempt)) is not None:
                code = 1  # a rank has ended, and srun has not ended the others yet: nobody hangs
            if code is not None:
                step, self._program = self._program, None
                step.end()
                for news in self._keeper.news():  # one that died at once has restored all the same
                    found += tell(news, self._record, self._say)
                found = [event for event in found if event not in hung]
                found += [*self._pace.last_look(), self._exited(code, step.words())]
        now = self._clock.now()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            found.append(events.Expired())
        number = self._attempt.number
        look = now >= self._look_at
        if look:
            self._look_at = now + _LOOK_S
        acts = not all(isinstance(event, events.Progress) for event in found)
        if (acts or look) and newer_than(self._dir.journal, number):
            # This host stood still or was cut off, and another leads now: what we did would hit the new attempt.
            return [events.Isolated(f"attempt {number + 1} of this run has begun")]
        return found

    def _signalled(self) -> list[events.Event]:
        found: list[events.Event] = []
        while self._signals:
            number = self._signals.pop(0)
            own = number == getattr(signal, f"SIG{self._site.signal}")
            cause = Cause.TIME_LIMIT if own else Cause.TERMINATED
            if cause is Cause.TERMINATED:
                self._watcher.rest()  # Slurm ends these steps too
                self._keeper.rest()
            self._record("stop asked", cause=cause, signal=signal.Signals(number).name)
            found.append(events.StopAsked(cause))
        return found

    def _requested(self) -> list[events.Event]:
        """What a person asks in the run directory."""
        now = self._clock.now()
        if now < self._ask_at:
            return []
        self._ask_at = now + _ASK_S
        request = requests.asked(self._dir, str(self._job.job_id), self._job.restarts)
        if request is None:
            return []
        requests.answered(self._dir)
        self._record("request", what=request.what, by=request.by)
        return [events.StopAsked(Cause.STOPPED if request.what == "stop" else Cause.REQUEUED)]

    def _events_aside(self) -> list[events.Event]:
        """What concerns a launcher that stands by: Slurm's signals, and whether another leads, and to which end."""
        self._clock.sleep(_TICK_S)
        found = self._signalled()
        if not found and self._clock.now() >= self._look_at:
            self._look_at = self._clock.now() + _LOOK_S
            ended = succession.end_of_successor(self._dir, self._attempt.number)
            if ended is not None:
                return [ended]
        if not found and self._deadline is not None and self._clock.now() >= self._deadline:
            if begun_after(self._dir.journal, self._attempt.number):
                self._deadline += self._state.limits.aside_s
            else:
                self._deadline = None
                found.append(events.Expired())
        return found

    def _handle(self, event: events.Event) -> events.Finish | None:
        """Decide about one event and act; what an action brings about is handled at once."""
        before = self._state.phase
        self._state, actions = phases.decide(self._state, event)
        if self._state.phase is not before:
            self._deadline = None
        for action in actions:
            match action:
                case events.Launch():
                    try:
                        self._launch(action)
                    except OSError as error:
                        self._end()
                        why = f"the program could not be started ({error})"
                        return self._handle(events.Exited(1, self._committed(), Cause.SLURM, why))
                case events.End():
                    goes_on = self._state.phase is state.Phase.LAUNCHING
                    self._end(self._state.active if goes_on else ())
                case events.Stacks(hosts):
                    self._write_stacks(hosts)
                case events.Distrust(below, evidence):
                    self._distrust = self._keeper.distrust = f"{below}@{self._attempt}"
                    self._record("distrust", below=below, upto=str(self._attempt), evidence=evidence)
                    self._say(f"step {below} and later ones are not restored any more: {evidence}")
                case events.AskStop(cause):
                    self._ask_stop(cause)
                case events.Wait(seconds):
                    self._deadline = self._clock.now() + seconds
                case events.Pause(cause, seconds):
                    self._deadline = self._clock.now() + seconds
                    self._record("pause", cause=cause, seconds=seconds)
                    self._say(f"waits {seconds:.0f} s before the next start ({cause})")
                case events.Probe(hosts):
                    lost = self._probe(hosts)
                    for host in lost:
                        self._keeper.drop(host)
                    found = [events.Host(host, Cause.HOST_LOST, evidence) for host, evidence in lost.items()]
                    return self._handle(events.Probed(tuple(found)))
                case events.Record(kind, restart):
                    self._record_restart(kind, restart)
                case events.Requeue():
                    return self._handle(self._requeue(action))
                case events.Finish():
                    return action
        return None

    def _from_sidecar(self, message: verdict.Message) -> list[events.Event]:
        match message:
            case verdict.Ready():
                self._record("monitoring", problem="", hosts=list(message.hosts))
            case verdict.Progress():
                return self._pace.take(message)
            case verdict.Verdict(cause="isolated"):
                return [events.Isolated(message.evidence)]
            case verdict.Replaced(by):
                return [events.Isolated(f"while this host was not heard, {by} has spoken for the job")]
            case verdict.Verdict(cause="silent" | "missing"):
                self._watcher.drop(message.host)
                self._keeper.drop(message.host)
                return [events.HostBad(message.host, Cause.HOST_SILENT, message.evidence, self._committed())]
            case verdict.Verdict(severity="act" | "act-at-checkpoint"):
                cause = Cause.STRAGGLER if message.cause == "straggler" else Cause.HOST_SICK
                can_wait = message.severity == "act-at-checkpoint"
                return [
                    events.HostBad(message.host, cause, message.evidence, self._committed(), can_wait=can_wait),
                ]
        return []

    def _exited(self, code: int, words: Sequence[str]) -> events.Exited:
        prefix = self._dir.logs / str(self._attempt)
        first = first_exit(prefix)
        if first is None and code == 0 and ended_well(prefix):
            return events.Exited(0, self._committed())
        cause, evidence = exits.classify(first, code, has_begun(prefix), words)
        return events.Exited((code if first is None else first.code) or 1, self._committed(), cause, evidence)

    # Actions

    def _launch(self, action: events.Launch) -> None:
        self._keeper.drain(self._attempt, action.hosts, lambda: bool(self._signals))
        self._attempt = replace(self._attempt, launch=action.launch)
        self._record("launch", hosts=list(action.hosts), spares=list(action.spares))
        self._say(f"launch {action.launch} on {fold_hosts(action.hosts)}")
        spec = self._submitted.spec
        self._job.shm.mkdir(mode=0o700, exist_ok=True)
        (self._job.shm / "stop").unlink(missing_ok=True)
        lost = (action.launch > 1 or self._job.restarts or self._taken) and not self._keeper.stays(action.hosts)
        variables = program_variables(self._dir, spec, self._site, self._leave_s)
        variables |= {"TRANSOM_ATTEMPT": str(self._attempt), "TRANSOM_SHM": str(self._job.shm)}
        if self._distrust:
            variables["TRANSOM_DISTRUST"] = self._distrust
        if lost and len(action.hosts) == spec.nodes:  # new servers bring what other hosts have, for as many ranks only
            variables["TRANSOM_GATHERING"] = str(self._attempt)
        self._program = self._steps.program(
            self._submitted.program,
            action.hosts,
            tasks_per_node=spec.tasks_per_node,
            environment=variables,
            prefix=self._dir.logs / str(self._attempt),
        )
        self._pace = self._new_pace()
        self._watcher.start(self._attempt, (*action.hosts, *action.spares))
        self._keeper.start(self._attempt, action.hosts, action.spares)

    @property
    def _leave_s(self) -> float:
        """How long a program may take to save and leave when it is asked to."""
        return max(10.0, self._site.signal_lead_s / 2)

    def _new_pace(self) -> Pace:
        spec = self._submitted.spec
        start_s = spec.start_deadline_s
        watch = HangWatch(self._clock.now(), start_s or START_DEADLINE_S, spec.hang_after_s or self._site.hang_after_s)
        strict = start_s is not None
        self._losses.begin()
        return Pace(
            self._job.shm, self._attempt, watch, strict, self._losses, self._committed, self._record, self._clock
        )

    def _end(self, serve: Sequence[str] = ()) -> None:
        """End the steps by force; the checkpoint server stays where it is for these hosts."""
        program, self._program = self._program, None
        # Side by side: while a host is dead each may need its whole deadline.
        ends = [self._watcher.end, lambda: self._keeper.end_unless(serve)]
        threads = [threading.Thread(target=end) for end in ends]
        for thread in threads:
            thread.start()
        if program is not None:
            program.end()
        for thread in threads:
            thread.join()

    def _write_stacks(self, hosts: Sequence[str]) -> None:
        folder = self._dir.logs / f"{self._attempt}-stacks"
        try:
            behind = self._steps.stacks(hosts, str(self._attempt), folder)
        except OSError as error:
            behind = f"the stacks could not be had: {error}"
        self._record("stacks", folder=str(folder), behind=behind)
        self._say(f"{behind} (stacks of all ranks: {folder})")

    def _requeue(self, action: events.Requeue) -> events.Requeued:
        self._clean()
        self._say(f"requeueing the job ({action.cause})")
        # Slurm answers a requeue by SIGTERM to us and to every process of ours.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return carry_on(
            self._dir,
            self._submitted,
            self._job,
            action.cause,
            self._slurm,
            self._environment,
            self._record,
            self._clock,
            may_requeue=not action.follow_up,
        )

    def _ask_stop(self, cause: Cause) -> None:
        self._say(f"asking the program to save and leave ({cause})")
        try:
            self._job.shm.mkdir(mode=0o700, exist_ok=True)
            (self._job.shm / "stop").write_text(cause)
        except OSError as error:  # it is ended by force when its time is up
            self._say(f"the program could not be asked: {error}")

    def _probe(self, hosts: Sequence[str]) -> dict[str, str]:
        try:
            lost = self._steps.probe(hosts)
            if lost and self._program is not None:
                # While a step is being started on a dead host, others may be slow to take one: they get another try.
                lost = self._steps.probe([self._job.home, *(host for host in lost if host != self._job.home)])
            return lost
        except OSError as error:  # this host is out of something: it tells nothing of the others
            self._say(f"hosts could not be tried: {error}")
            return {}

    def _clean(self) -> None:
        out = {host.name for host in self._state.out}
        hosts = [host for host in (*self._state.active, *self._state.spares) if host not in out]
        try:
            self._steps.clean(hosts)
        except OSError as error:
            self._say(f"shared memory could not be given back: {error}")

    def _close(self, finish: events.Finish) -> int:
        self.finish = finish
        if finish.ending is not events.Ending.LEFT:
            self._keeper.drain(self._attempt, self._state.active, lambda: bool(self._signals))
        self._end()
        if finish.ending is not events.Ending.LEFT:
            self._clean()
        else:  # no step can be started any more, on this host or another
            shutil.rmtree(self._job.shm, ignore_errors=True)
        self._record("end", ending=finish.ending, why=finish.why, code=finish.code, committed=self._committed())
        self._say(f"{finish.ending}: {finish.why}")
        self._diary.close()
        return finish.code

    # Small things

    def _monitoring_problem(self, problem: str) -> None:
        self._record("monitoring", problem=problem)
        self._say(problem)

    def _server_problem(self, problem: str, lasting: bool) -> None:
        self._record("server", problem=problem, lasting=lasting)
        self._say(problem)

    def _committed(self) -> int:
        try:
            steps = self._dir.committed_steps()
        except OSError:  # the file system does not answer just now
            return self._seen_committed
        self._seen_committed = steps[-1] if steps else 0
        return self._seen_committed

    def _record(self, kind: str, **facts: Any) -> None:
        self._diary.record(self._attempt, kind, **facts)

    def _record_restart(self, kind: str, restart: Restart) -> None:
        self._record(
            kind,
            cause=restart.cause,
            host_out=restart.host,
            evidence=restart.evidence,
            committed=restart.committed,
            step=restart.step or self._state.step,
            restored=restart.restored,
        )
        self._say(f"{kind}: {restart.cause}{' ' + restart.host if restart.host else ''}; {restart.evidence}")

    def _say(self, text: str) -> None:
        self._diary.say(text)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number not in self._signals:  # Slurm may tell every process, and who started us tells us too
            self._signals.append(number)
