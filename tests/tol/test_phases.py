"""The state machine: each cause leads where it should, and random events never lead astray."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_hpc.tol.causes import BUDGETS, Cause, Restart
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
    Event,
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
    StopAsked,
    Unwatched,
    Wait,
    together,
)
from transom_hpc.tol.phases import LEADS, TABLE, decide
from transom_hpc.tol.state import Phase, Run

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
    past = (Restart(Cause.MISPLACED, 0),) * BUDGETS[Cause.MISPLACED].restarts
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
        Record("restart", Restart(Cause.HOST_SILENT, 7, "n3", "not heard", 10)),
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
    assert actions == (Record("host out", Restart(Cause.HOST_SILENT, 7, "n5", "not heard", 10)),)
    assert (run.phase, run.spares) == (Phase.RUNNING, ())


def test_hosts_that_are_lost_together_are_replaced_together() -> None:
    others = (Host("n4", Cause.HOST_SILENT, "e"), Host("n5", Cause.HOST_SILENT, "e"), Host("n9", Cause.HOST_LOST, "e"))
    _, actions = decide(running(2), HostBad("n2", Cause.HOST_SILENT, "e", 7, others))
    assert kinds(actions) == ["Record", "Record", "Record", "End", "Requeue"], "one spare is lost with them"
    _, actions = decide(running(2), HostBad("n4", Cause.HOST_SILENT, "e", 7, (Host("n2", Cause.HOST_SILENT, "e"),)))
    assert actions == (
        Record("host out", Restart(Cause.HOST_SILENT, 7, "n4", "e", 10)),
        Record("restart", Restart(Cause.HOST_SILENT, 7, "n2", "e", 10)),
        End(),
        Launch(2, ("n1", "n5", "n3"), ()),
    )
    _, actions = decide(running(2), HostBad("n2", Cause.HOST_SILENT, "e", 7, (Host("n1", Cause.HOST_SILENT, "e"),)))
    assert kinds(actions) == ["Record", "End", "Wait"]


def test_verdicts_that_come_together_are_one_event() -> None:
    bad = [HostBad(name, Cause.HOST_SILENT, name, 7) for name in ("n2", "n3")]
    other = Host("n3", Cause.HOST_SILENT, "n3")
    assert together([bad[0], Progress(3, 2), bad[1]]) == [Progress(3, 2), replace(bad[0], others=(other,))]
    assert together([bad[0], Progress(3, 2)]) == [bad[0], Progress(3, 2)]
    assert together([]) == []


def test_a_host_is_taken_out_once() -> None:
    run, _ = decide(running(), HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    assert decide(run, HostBad("n3", Cause.HOST_LOST, "down", 7)) == (run, ())


def test_without_the_right_to_requeue_another_job_carries_the_run_on() -> None:
    run = running(0, can_requeue="the job was submitted with --no-requeue")
    run, actions = decide(run, HostBad("n3", Cause.HOST_SILENT, "not heard", 7))
    assert actions[-1] == Requeue(Cause.HOST_SILENT, follow_up=True)
    _, actions = decide(run, Requeued(True, "job 12 carries the run on"))
    assert actions == (Finish(Ending.LEFT, "job 12 carries the run on", 0),)


def test_a_host_that_is_cut_off_stands_by() -> None:
    run, actions = decide(running(), HostBad("n1", Cause.HOST_SILENT, "not heard", 7))
    assert (run.phase, kinds(actions)) == (Phase.ASIDE, ["Record", "End", "Wait"])
    assert actions[-1] == Wait(run.limits.aside_s)
    assert decide(run, Isolated("again")) == (run, ())
    _, actions = decide(run, Ended(Ending.WELL, "the program ended", 0))
    assert isinstance(actions[-1], Finish)
    assert (actions[-1].ending, actions[-1].code) == (Ending.LEFT, 0)
    _, actions = decide(run, StopAsked(Cause.TERMINATED))
    assert isinstance(actions[-1], Finish)
    back, actions = decide(run, Expired())
    assert (back.phase, kinds(actions)) == (Phase.REQUEUEING, ["Record", "End", "Requeue"])
    assert back.restarts[-1].cause is Cause.LAUNCHER_LOST


def test_a_sick_home_is_left_with_the_job() -> None:
    run, actions = decide(running(), HostBad("n1", Cause.HOST_SICK, "its memory fails", 7))
    assert (run.phase, kinds(actions)) == (Phase.REQUEUEING, ["Record", "End", "Requeue"])
    assert [host.name for host in run.out] == ["n1"]


def test_fewer_hosts_where_the_program_can() -> None:
    run, actions = decide(running(0, least=3), HostBad("n2", Cause.HOST_SILENT, "e", 7))
    assert actions[-1] == Launch(2, ("n1", "n3", "n4", "n5"), ())
    run, actions = decide(run, HostBad("n5", Cause.HOST_SILENT, "e", 7))
    assert actions[-1] == Launch(3, ("n1", "n3", "n4"), ())
    _, actions = decide(run, HostBad("n3", Cause.HOST_SILENT, "e", 7))
    assert kinds(actions) == ["Record", "End", "Requeue"]
    _, actions = decide(new_run(0, least=3), Placed((Host("n2", Cause.HOST_SILENT, "was silent"),)))
    assert actions == (Launch(1, ("n1", "n3", "n4", "n5"), ()),)


def test_a_host_that_can_wait_is_replaced_after_the_next_checkpoint() -> None:
    slow = HostBad("n3", Cause.STRAGGLER, "twice as slow", 5, can_wait=True)
    run, actions = decide(running(), slow)
    assert (actions, run.phase) == ((), Phase.RUNNING)
    assert decide(run, slow) == (run, ())
    same, actions = decide(run, Progress(11, 5))
    assert (same.phase, actions) == (Phase.RUNNING, ())
    again, actions = decide(run, Progress(11, 10))
    assert actions[-1] == Launch(2, ("n1", "n2", "n5", "n4"), ())
    assert (again.restarts[-1].cause, again.restarts[-1].host) == (Cause.STRAGGLER, "n3")
    run, _ = decide(running(0), slow)
    run, actions = decide(run, Progress(11, 10))
    assert (run.phase, actions) == (Phase.RUNNING, ()), "without a spare a slow host is better than none"


def test_pauses_grow_and_a_signal_ends_them() -> None:
    run = running(exit=Exited(1, 5, Cause.STORAGE, "no space left"))
    waits = []
    for _ in range(4):
        run, _ = decide(replace(run, phase=Phase.RUNNING), Exited(1, 5, Cause.STORAGE, "no space left"))
        run, actions = decide(run, Probed())
        waits += [action.seconds for action in actions if isinstance(action, Pause)]
        if run.phase is Phase.PAUSING:
            stopped, actions = decide(run, StopAsked(Cause.TERMINATED))
            assert stopped.phase is Phase.OVER
            run, actions = decide(run, Expired())
        assert isinstance(actions[-1], Launch)
    assert waits == [15, 30, 60]


def test_two_early_deaths_from_one_checkpoint_distrust_it() -> None:
    run = running()
    distrusted = []
    for _ in range(3):
        run, _ = decide(replace(run, phase=Phase.LAUNCHING), Restored(100))
        run, _ = decide(run, Progress(101, 100))
        run, _ = decide(run, Exited(1, 100))
        run, actions = decide(run, Probed())
        distrusted.append([action.below for action in actions if isinstance(action, Distrust)])
    assert distrusted == [[], [100], [100]]
    run = running()
    for step in (101, 150, 101, 101):  # the second death is a late one: it says nothing of the checkpoint
        run, _ = decide(replace(run, phase=Phase.LAUNCHING), Restored(100))
        run, _ = decide(run, Progress(step, 100))
        run, _ = decide(run, Exited(1, 100))
        run, actions = decide(run, Probed())
        distrusted.append([action.below for action in actions if isinstance(action, Distrust)])
    assert distrusted[3:] == [[], [], [], [100]]
    run = running()
    for code, cause in ((1, Cause.PROGRAM_ERROR), (1, Cause.SLURM), (1, Cause.PROGRAM_ERROR)):
        run, _ = decide(replace(run, phase=Phase.LAUNCHING), Restored(100))
        run, _ = decide(run, Exited(code, 100, cause))
        run, actions = decide(run, Probed())
    assert [action.below for action in actions if isinstance(action, Distrust)] == [100], "Slurm's fault says nothing"


def test_diverged_goes_back_to_before_it() -> None:
    run, actions = decide(running(), Diverged("the loss is NaN since step 7", 8, 7))
    assert kinds(actions) == ["Distrust", "Record", "End", "Launch"]
    assert actions[0] == Distrust(7, "the loss is NaN since step 7")
    assert run.restarts[-1].cause is Cause.DIVERGED


def test_checkpoints_of_what_diverged_refill_no_budget() -> None:
    run, launches = running(), 0
    for saved in range(10, 100, 10):
        run, _ = decide(replace(run, phase=Phase.RUNNING), Progress(saved, saved))
        run, actions = decide(run, Diverged("the loss is NaN since step 7", saved, 7))
        launches += any(isinstance(action, Launch) for action in actions)
    assert launches == BUDGETS[Cause.DIVERGED].restarts
    assert run.phase is Phase.OVER


def test_a_person_stops_it() -> None:
    run, actions = decide(running(), StopAsked(Cause.STOPPED))
    assert kinds(actions) == ["AskStop", "Wait"]
    _, actions = decide(run, Exited(EXIT_STOPPED, 11))
    assert isinstance(actions[-1], Finish)
    assert (actions[-1].ending, actions[-1].code) == (Ending.STOPPED, EXIT_STOPPED)
    assert "step 11" in actions[-1].why
    run, _ = decide(running(), StopAsked(Cause.TIME_LIMIT))
    run, actions = decide(run, StopAsked(Cause.STOPPED))
    assert actions == (), "it is stopping already"
    _, actions = decide(run, Exited(EXIT_STOPPED, 11))
    assert actions[-1].ending is Ending.STOPPED, "and does not come back"  # type: ignore[union-attr]


def test_a_person_requeues_it() -> None:
    run, _ = decide(running(), StopAsked(Cause.REQUEUED))
    run, actions = decide(run, Exited(EXIT_STOPPED, 11))
    assert kinds(actions) == ["Record", "End", "Requeue"]
    assert run.restarts[-1].cause is Cause.REQUEUED


def test_bad_exit_waits_for_a_verdict_on_a_host() -> None:
    run, actions = decide(running(), Exited(1, 5))
    assert run.phase is Phase.SETTLING
    assert actions == (Wait(run.limits.settle_s),), "the sidecar that may give it is not ended"
    again, actions = decide(run, HostBad("n2", Cause.HOST_SILENT, "not heard", 5))
    assert again.restarts[-1].cause is Cause.HOST_SILENT
    assert isinstance(actions[-1], Launch)


@pytest.mark.parametrize(("code", "cause"), [(1, Cause.PROGRAM_ERROR), (137, Cause.OUT_OF_MEMORY)])
def test_bad_exit_without_verdict_restarts_in_place(code: int, cause: Cause) -> None:
    run, _ = decide(running(), Exited(code, 5, cause))
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
    run, _ = decide(running(), Exited(137, 5, Cause.PROGRAM_KILLED))
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
        run, _ = decide(run, Exited(3, 5, evidence="rank 1 on n2: exit status 3"))
        run, actions = decide(run, Probed())
        if run.phase is Phase.PAUSING:
            run, actions = decide(run, Expired())
        if run.phase is Phase.OVER:
            break
        launches += 1
    assert launches == 1 + BUDGETS[Cause.PROGRAM_ERROR].restarts
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
    assert kinds(actions) == ["Stacks", "Record", "End", "Launch"]
    assert run.restarts[-1].cause is Cause.PROGRAM_HUNG


def test_time_limit_saves_then_requeues() -> None:
    run, actions = decide(running(), StopAsked(Cause.TIME_LIMIT))
    assert kinds(actions) == ["AskStop", "Wait"]
    run, actions = decide(run, Exited(EXIT_STOPPED, 11))
    assert kinds(actions) == ["Record", "End", "Requeue"]
    evidence = "the program was asked to leave; step 11 is saved"
    assert run.restarts[-1] == Restart(Cause.TIME_LIMIT, 11, evidence=evidence, step=10)


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
    st.builds(Restored, st.integers(0, 5)),
    st.builds(Progress, st.integers(1, 50), st.integers(0, 50)),
    st.builds(
        Exited,
        st.sampled_from([0, 1, 72, 75, 137]),
        st.integers(0, 5),
        st.sampled_from([Cause.PROGRAM_ERROR, Cause.STORAGE, Cause.SLURM, Cause.OUT_OF_MEMORY]),
    ),
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
    st.builds(
        HostBad, st.sampled_from(HOSTS), st.just(Cause.STRAGGLER), st.just("e"), st.just(0), can_wait=st.just(True)
    ),
    st.builds(Hung, st.just("e"), st.just(0)),
    st.builds(Diverged, st.just("e"), st.just(0), st.integers(0, 9)),
    st.builds(StopAsked, st.sampled_from([Cause.TIME_LIMIT, Cause.TERMINATED, Cause.STOPPED, Cause.REQUEUED])),
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
    st.builds(Ended, st.sampled_from(list(Ending)), st.just("e"), st.sampled_from([0, 1])),
)


@given(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.lists(EVENTS, max_size=60))
@settings(max_examples=800, deadline=None)
def test_random_events(spares: int, elastic: int, can: bool, events: list[Event]) -> None:
    run = new_run(spares, least=max(1, len(HOSTS) - spares - elastic), can_requeue="" if can else "not allowed")
    run, actions = decide(run, Placed())
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
            rule = TABLE.get((before, type(event)), "-")
            run, actions = decide(run, event)
            assert run.phase is before or run.phase in LEADS[rule], f"{rule} has led to {run.phase}"
            waiting = waiting and run.phase is before
        for action in actions:
            match action:
                case Launch(launch, hosts, standing_by):
                    assert not alive, "started twice"
                    alive = True
                    assert run.least <= len(hosts) <= run.needed
                    assert len(hosts) == len(set(hosts))
                    assert len(hosts) == run.needed or not standing_by, "spares idle while hosts are missing"
                    assert not {host.name for host in run.out} & {*hosts, *standing_by}
                    assert "n1" in hosts
                    assert launch == run.launch
                case End():
                    alive = False
                case Wait() | Pause():
                    waiting = True
                case Finish():
                    finishes += 1
                case AskStop():
                    assert alive
        assert finishes == (run.phase is Phase.OVER)
        if run.phase in (Phase.SETTLING, Phase.STOPPING, Phase.PAUSING, Phase.ASIDE):
            assert waiting, "a phase without end"
        if run.phase in (Phase.LAUNCHING, Phase.RUNNING):
            assert alive, "nothing runs and nothing is waited for"
        for cause in Cause:
            for committed in {restart.committed for restart in run.restarts}:
                same = [past for past in run.restarts if past.cause is cause and past.committed == committed]
                assert len(same) <= BUDGETS[cause].restarts


def test_the_table_is_whole() -> None:
    assert {phase for phase, _ in TABLE} == set(Phase) - {Phase.OVER}
    assert {event for _, event in TABLE} == set(get_args(Event))
    assert len(TABLE) == (len(Phase) - 1) * len(get_args(Event))
    assert {rule for rule in TABLE.values() if rule != "-"} == set(LEADS)


@given(st.sampled_from(list(Phase)), EVENTS)
def test_every_pair_is_defined(phase: Phase, event: Event) -> None:
    run, actions = decide(running(phase=phase, exit=Exited(1, 0)), event)
    assert isinstance(run, Run)
    assert isinstance(actions, tuple)


def test_over_is_over() -> None:
    run = running(phase=Phase.OVER)
    assert decide(run, HostBad("n3", Cause.HOST_LOST, "", 0)) == (run, ())
