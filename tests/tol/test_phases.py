"""The state machine: each cause leads where it should, and random events never lead astray."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_hpc.tol.causes import LIMITS, Cause, Restart
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
    Requeued,
    StopAsked,
    Unwatched,
    Wait,
    together,
)
from transom_hpc.tol.phases import Phase, Run, decide

HOSTS = ("n1", "n2", "n3", "n4", "n5")


def new_run(spares: int = 1, **changes: object) -> Run:
    needed = len(HOSTS) - spares
    run = Run(Phase.STARTING, needed, "n1", HOSTS[:needed], HOSTS[needed:])
    return replace(run, **changes)  # type: ignore[arg-type]


def running(spares: int = 1, **changes: object) -> Run:
    run, _ = decide(new_run(spares), Placed())
    run, _ = decide(run, Progress(10, 5))
    return replace(run, **changes)  # type: ignore[arg-type]


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_start() -> None:
    run, actions = decide(new_run(), Placed())
    assert actions == (Launch(1, ("n1", "n2", "n3", "n4"), ("n5",)),)
    assert run.phase is Phase.LAUNCHING
    run, actions = decide(run, Progress(1, 0))
    assert (run.phase, actions) == (Phase.RUNNING, ())


def test_misplaced_host_is_left_out_where_a_spare_stands_by() -> None:
    old = Host("n2", Cause.HOST_SILENT, "was silent")
    run, actions = decide(new_run(), Placed((old,)))
    assert actions == (Launch(1, ("n1", "n3", "n4", "n5"), ()),)
    assert run.out == (old,)


@pytest.mark.parametrize(("spares", "bad"), [(0, "n2"), (1, "n1")])
def test_misplaced_host_that_is_needed_means_requeue(spares: int, bad: str) -> None:
    run, actions = decide(new_run(spares), Placed((Host(bad, Cause.HOST_SILENT, "was silent"),)))
    assert kinds(actions) == ["Record", "End", "Requeue"]
    assert run.phase is Phase.REQUEUEING


def test_misplaced_again_and_again_stops() -> None:
    past = (Restart(Cause.MISPLACED, 0),) * LIMITS[Cause.MISPLACED]
    _, actions = decide(new_run(0, restarts=past), Placed((Host("n2", Cause.HOST_SILENT, "was silent"),)))
    assert isinstance(actions[-1], Finish)
    assert actions[-1].ending is Ending.BADLY


def test_ended_well() -> None:
    _, actions = decide(running(), Exited(0, 10))
    assert actions == (Finish(Ending.WELL, "the program ended", 0),)


@pytest.mark.parametrize("phase", [Phase.LAUNCHING, Phase.RUNNING])
def test_silent_host_is_replaced_by_the_spare_in_its_place(phase: Phase) -> None:
    run, actions = decide(running(phase=phase), HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    assert actions == (
        Record("restart", Restart(Cause.HOST_SILENT, 7, "n3", "not heard")),
        End(),
        Launch(2, ("n1", "n2", "n5", "n4"), ()),
    )
    assert run.phase is Phase.LAUNCHING
    assert run.restarts[-1].committed == 7


def test_second_loss_requeues() -> None:
    run, _ = decide(running(), HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    run, actions = decide(run, HostBad("n4", Cause.HOST_LOST, "down", 7))
    assert kinds(actions) == ["Record", "End", "Requeue"]
    assert [host.name for host in run.out] == ["n3", "n4"]
    _, actions = decide(run, Requeued(True))
    assert actions == (Finish(Ending.LEFT, "requeued", 0),)


def test_lost_spare_is_only_noted() -> None:
    run, actions = decide(running(), HostBad("n5", Cause.HOST_SILENT, "not heard", 7))
    assert actions == (Record("host out", Restart(Cause.HOST_SILENT, 7, "n5", "not heard")),)
    assert (run.phase, run.spares) == (Phase.RUNNING, ())


def test_hosts_that_are_lost_together_are_replaced_together() -> None:
    others = (Host("n4", Cause.HOST_SILENT, "e"), Host("n5", Cause.HOST_SILENT, "e"), Host("n9", Cause.HOST_LOST, "e"))
    _, actions = decide(running(2), HostBad("n2", Cause.HOST_SILENT, "e", 7, others))
    assert kinds(actions) == ["Record", "Record", "Record", "End", "Requeue"], "one spare is lost with them"
    _, actions = decide(running(2), HostBad("n4", Cause.HOST_SILENT, "e", 7, (Host("n2", Cause.HOST_SILENT, "e"),)))
    assert actions == (
        Record("host out", Restart(Cause.HOST_SILENT, 7, "n4", "e")),
        Record("restart", Restart(Cause.HOST_SILENT, 7, "n2", "e")),
        End(),
        Launch(2, ("n1", "n5", "n3"), ()),
    )
    _, actions = decide(running(2), HostBad("n2", Cause.HOST_SILENT, "e", 7, (Host("n1", Cause.HOST_SILENT, "e"),)))
    assert kinds(actions) == ["End", "Finish"]


def test_verdicts_that_come_together_are_one_event() -> None:
    bad = [HostBad(name, Cause.HOST_SILENT, name, 7) for name in ("n2", "n3")]
    other = Host("n3", Cause.HOST_SILENT, "n3")
    assert together([bad[0], Progress(3, 2), bad[1]]) == [Progress(3, 2), replace(bad[0], others=(other,))]
    assert together([bad[0], Progress(3, 2)]) == [bad[0], Progress(3, 2)]
    assert together([]) == []


def test_a_host_is_taken_out_once() -> None:
    run, _ = decide(running(), HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    assert decide(run, HostBad("n3", Cause.HOST_LOST, "down", 7)) == (run, ())


def test_no_requeue_allowed() -> None:
    run = running(0, can_requeue="the job was submitted with --no-requeue")
    _, actions = decide(run, HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    assert isinstance(actions[-1], Finish)
    assert "--no-requeue" in actions[-1].why


def test_own_host_bad_is_isolation() -> None:
    _, actions = decide(running(), HostBad("n1", Cause.HOST_SILENT, "not heard", 7))
    assert kinds(actions) == ["End", "Finish"]


def test_bad_exit_waits_for_a_verdict_on_a_host() -> None:
    run, actions = decide(running(), Exited(1, 5))
    assert run.phase is Phase.SETTLING
    assert actions == (Wait(run.limits.settle_s),), "the sidecar that may give it is not ended"
    again, actions = decide(run, HostBad("n2", Cause.HOST_SILENT, "not heard", 5))
    assert again.restarts[-1].cause is Cause.HOST_SILENT
    assert isinstance(actions[-1], Launch)


@pytest.mark.parametrize(("code", "cause"), [(1, Cause.PROGRAM_ERROR), (137, Cause.PROGRAM_KILLED)])
def test_bad_exit_without_verdict_restarts_in_place(code: int, cause: Cause) -> None:
    run, _ = decide(running(), Exited(code, 5))
    run, actions = decide(run, Expired())
    assert actions == (Probe(("n1", "n2", "n3", "n4", "n5")),)
    run, actions = decide(run, Probed())
    assert kinds(actions) == ["Record", "End", "Launch"]
    assert (run.restarts[-1].cause, run.active) == (cause, ("n1", "n2", "n3", "n4"))


def test_probe_finds_the_lost_host() -> None:
    run, _ = decide(running(), Exited(137, 5))
    lost = Host("n2", Cause.HOST_LOST, "no step can be started on n2: Node failure")
    run, actions = decide(run, Probed((lost,)))
    assert kinds(actions) == ["Record", "End", "Launch"]
    assert (run.restarts[-1].cause, run.active) == (Cause.HOST_LOST, ("n1", "n5", "n3", "n4"))


def test_probe_finds_a_lost_spare_too() -> None:
    run, _ = decide(running(), Exited(137, 5))
    run, actions = decide(run, Probed((Host("n5", Cause.HOST_LOST, "e"),)))
    assert kinds(actions) == ["Record", "Record", "End", "Launch"]
    assert (run.restarts[-1].cause, run.spares) == (Cause.PROGRAM_KILLED, ())


def test_host_lost_while_the_steps_are_started() -> None:
    run = running(phase=Phase.LAUNCHING)
    assert decide(running(), Unwatched())[1] == (), "a program that takes steps has all its hosts"
    same, actions = decide(run, Unwatched())
    assert (same, actions) == (run, (Probe(("n1", "n2", "n3", "n4", "n5")),))
    assert decide(run, Probed()) == (run, ())
    again, actions = decide(run, Probed((Host("n3", Cause.HOST_LOST, "e"),)))
    assert kinds(actions) == ["Record", "End", "Launch"]
    assert (again.restarts[-1].cause, again.active) == (Cause.HOST_LOST, ("n1", "n2", "n5", "n4"))
    again, actions = decide(run, Probed((Host("n5", Cause.HOST_LOST, "e"),)))
    assert (kinds(actions), again.spares, again.active) == (["Record"], (), run.active)


def test_probe_finds_our_own_host_lost() -> None:
    run, _ = decide(running(), Exited(1, 5))
    run, actions = decide(run, Probed((Host("n1", Cause.HOST_LOST, "e"),)))
    assert kinds(actions) == ["Record", "End", "Requeue"]


def test_program_that_always_fails_stops_and_says_why() -> None:
    run, launches = running(), 1
    for _ in range(100):
        run, _ = decide(run, Exited(3, 5))
        run, actions = decide(run, Probed())
        if run.phase is Phase.OVER:
            break
        launches += 1
    assert launches == 1 + LIMITS[Cause.PROGRAM_ERROR]
    finish = actions[-1]
    assert isinstance(finish, Finish)
    assert (finish.ending, finish.code) == (Ending.BADLY, 3)
    assert "without a new checkpoint since step 5" in finish.why
    assert "exit status 3" in finish.why


def test_progress_refills_the_budget() -> None:
    run = running()
    for committed in range(5, 50):
        run, _ = decide(run, Exited(3, committed))
        run, actions = decide(run, Probed())
        assert isinstance(actions[-1], Launch)


def test_not_shared_is_final() -> None:
    _, actions = decide(running(), Exited(EXIT_NOT_SHARED, 0))
    assert isinstance(actions[-1], Finish)
    assert "does not see the run directory" in actions[-1].why


def test_hang_restarts() -> None:
    run, actions = decide(running(), Hung("no step for 90 s", 5))
    assert kinds(actions) == ["Record", "End", "Launch"]
    assert run.restarts[-1].cause is Cause.PROGRAM_HUNG


def test_time_limit_saves_then_requeues() -> None:
    run, actions = decide(running(), StopAsked(Cause.TIME_LIMIT))
    assert kinds(actions) == ["AskStop", "Wait"]
    run, actions = decide(run, Exited(EXIT_STOPPED, 11))
    assert kinds(actions) == ["Record", "End", "Requeue"]
    evidence = "the program was asked to leave; step 11 is saved"
    assert run.restarts[-1] == Restart(Cause.TIME_LIMIT, 11, evidence=evidence)


def test_time_limit_when_the_program_does_not_leave() -> None:
    run, _ = decide(running(), StopAsked(Cause.TIME_LIMIT))
    run, actions = decide(run, Expired())
    assert kinds(actions) == ["Record", "End", "Requeue"]
    assert run.restarts[-1].evidence == "the program did not leave by itself"


def test_signal_that_reached_only_the_steps() -> None:
    _, actions = decide(running(), Exited(EXIT_STOPPED, 11))
    assert kinds(actions) == ["Record", "End", "Requeue"]


def test_terminated_leaves_the_rest_to_slurm() -> None:
    run, actions = decide(running(), StopAsked(Cause.TERMINATED))
    assert kinds(actions) == ["AskStop", "Wait"]
    _, actions = decide(run, Exited(137, 11))
    assert kinds(actions) == ["Record", "End", "Finish"]
    assert isinstance(actions[0], Record)
    assert actions[0].kind == "stopped"
    assert isinstance(actions[-1], Finish)
    assert actions[-1].ending is Ending.LEFT


def test_host_lost_while_stopping_does_not_restart() -> None:
    run, _ = decide(running(), StopAsked(Cause.TIME_LIMIT))
    run, actions = decide(run, HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    assert kinds(actions) == ["Record"]
    assert run.phase is Phase.STOPPING


def test_requeue_refused_is_final() -> None:
    run, _ = decide(running(0), HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    _, actions = decide(run, Requeued(False, "Requested operation is presently disabled"))
    assert isinstance(actions[-1], Finish)
    assert "presently disabled" in actions[-1].why


def test_a_cancelled_job_is_left_alone() -> None:
    run, _ = decide(running(), StopAsked(Cause.TIME_LIMIT))
    run, _ = decide(run, Exited(EXIT_STOPPED, 11))
    _, actions = decide(run, Requeued(False, "Slurm has ended the job already", cancelled=True))
    assert actions == (Finish(Ending.LEFT, "Slurm has ended the job already", EXIT_STOPPED),)


EVENTS = st.one_of(
    st.builds(Placed),
    st.builds(Progress, st.integers(1, 50), st.integers(0, 50)),
    st.builds(Exited, st.sampled_from([0, 1, 72, 75, 137]), st.integers(0, 5)),
    st.builds(
        HostBad,
        st.sampled_from(HOSTS),
        st.sampled_from([Cause.HOST_SILENT, Cause.HOST_LOST]),
        st.just("e"),
        st.just(0),
        st.lists(st.builds(Host, st.sampled_from(HOSTS), st.just(Cause.HOST_SILENT), st.just("e")), max_size=2).map(
            tuple
        ),
    ),
    st.builds(Hung, st.just("e"), st.just(0)),
    st.builds(StopAsked, st.sampled_from([Cause.TIME_LIMIT, Cause.TERMINATED])),
    st.builds(Isolated, st.just("e")),
    st.builds(Expired),
    st.builds(Unwatched),
    st.builds(
        Probed,
        st.lists(st.sampled_from(HOSTS), max_size=2, unique=True).map(
            lambda names: tuple(Host(name, Cause.HOST_LOST, "e") for name in names)
        ),
    ),
    st.builds(Requeued, st.booleans(), cancelled=st.booleans()),
)


@given(st.integers(0, 3), st.lists(EVENTS, max_size=60))
@settings(max_examples=500, deadline=None)
def test_random_events(spares: int, events: list[Event]) -> None:
    run, actions = decide(new_run(spares), Placed())
    alive = False  # whether a program step is running
    waiting = False
    finishes = 0
    for event in [None, *events]:
        if event is not None:
            if isinstance(event, Exited):
                if not alive:
                    continue  # nothing there that could exit
                alive = False
            if isinstance(event, Expired) and not waiting:
                continue
            if isinstance(event, Probed) and {host.name for host in event.lost} & {host.name for host in run.out}:
                continue  # only hosts that are still counted on are probed
            before = run.phase
            run, actions = decide(run, event)
            waiting = waiting and run.phase is before
        for action in actions:
            match action:
                case Launch(launch, hosts, standing_by):
                    assert not alive, "started twice"
                    alive = True
                    assert len(hosts) == run.needed == len(set(hosts))
                    assert not {host.name for host in run.out} & {*hosts, *standing_by}
                    assert "n1" in hosts
                    assert launch == run.launch
                case End():
                    alive = False
                case Wait():
                    waiting = True
                case Finish():
                    finishes += 1
                case AskStop():
                    assert alive
        assert finishes == (run.phase is Phase.OVER)
        if run.phase in (Phase.SETTLING, Phase.STOPPING):
            assert waiting, "a phase without end"
        if run.phase in (Phase.LAUNCHING, Phase.RUNNING):
            assert alive, "nothing runs and nothing is waited for"
        for cause in Cause:
            for committed in {restart.committed for restart in run.restarts}:
                same = [past for past in run.restarts if past.cause is cause and past.committed == committed]
                assert len(same) <= LIMITS[cause]


@given(st.sampled_from(list(Phase)), EVENTS)
def test_every_pair_is_defined(phase: Phase, event: Event) -> None:
    run, actions = decide(running(phase=phase), event)
    assert isinstance(run, Run)
    assert isinstance(actions, tuple)


def test_over_is_over() -> None:
    run = running(phase=Phase.OVER)
    assert decide(run, HostBad("n3", Cause.HOST_LOST, "", 0)) == (run, ())
