from collections.abc import Callable
from datetime import timedelta

import pytest

from transom_hpc.base.errors import SlurmUnreachable
from transom_hpc.slurm.jobid import JobId
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import (
    RS,
    SACCT_FIELDS,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    US,
    parse_sacct,
    parse_show_job,
    parse_sinfo,
    parse_squeue,
)

Recorded = Callable[[str], str]


def _marked(header: list[str], rows: list[list[str]]) -> str:
    return "".join(RS + US.join(row) + "\n" for row in [header, *rows])


SQUEUE_HEADER = [
    "JOBID",
    "JOBID",
    "STATE",
    "REASON",
    "NODES",
    "START_TIME",
    "END_TIME",
    "NODELIST",
    "EXC_NODES",
    "COMMENT",
    "NAME",
]


def _squeue_24(text: str) -> str:
    """The recorded columns i A F K T r N D S e j in the order and with the separators that we ask for."""
    rows = []
    for line in text.splitlines():
        shown, raw, _, _, state, reason, hosts, nodes, start, end, name = line.split("|", 10)
        rows.append([shown, raw, state, reason, nodes, start, end, hosts, "", "(null)", name])
    return _marked(SQUEUE_HEADER, rows)


def _sinfo_24(text: str) -> str:
    rows = []
    for line in text.splitlines():
        host, short, _, rest = line.split("|", 3)
        reason, since, user = rest.rsplit("|", 2)
        rows.append([host, short, since, user, reason])
    return _marked(rows[0], rows[1:])


def _sacct_24(text: str) -> str:
    rows = []
    for line in text.splitlines():
        shown, raw, state, code, _, hosts, _, start, end, reason, name = line.split("|", 10)
        rows.append([shown, raw, state, code, hosts, start, end, reason, name])
    return "".join(US.join(row) + "\n" for row in rows)


# --- squeue


def test_squeue_of_22_05(recorded: Recorded) -> None:
    rows = {row.job_id: row for row in parse_squeue(recorded("slurm-22.05.8/1-mixed-squeue.txt"))}
    odd = rows[1]
    assert (odd.id, odd.state, odd.state_text, odd.reason) == (JobId(1), JobState.RUNNING, "RUNNING", "")
    assert odd.name == 'odd | name = "x" é\nand a second line'
    assert odd.comment == "a|b c=1\nComment=x\n   StdOut=/not/this"
    assert (odd.hosts, odd.nodes) == (("n1", "n2"), 2)
    held = rows[3]
    assert (held.state, held.reason, held.exc_hosts) == (JobState.HELD, "JobHeldUser", ("n4",))
    assert (held.hosts, held.start_time, held.end_time, held.comment) == ((), "", "", "")
    many = rows[6].id
    assert many.job == 6
    assert many.tasks == (1, 2, 4, 8, 16, 32, 64, *range(101, 400, 7))  # 22.05 cuts it at 64 bytes if it may
    tasks = [row.id for row in rows.values() if row.id.job == 2]
    assert JobId(2, (10, 15, 20), 1) in tasks
    assert len(rows) == len(parse_squeue(recorded("slurm-22.05.8/1-mixed-squeue.txt")))


def test_squeue_of_22_05_after_a_requeue(recorded: Recorded) -> None:
    (row,) = (row for row in parse_squeue(recorded("slurm-22.05.8/2-requeued-squeue.txt")) if row.job_id == 1)
    assert (row.state, row.reason, row.hosts) == (JobState.WAITING, "BeginTime", ())
    assert row.start_time.startswith("20")


def test_squeue_of_24_11(recorded: Recorded) -> None:
    rows = parse_squeue(_squeue_24(recorded("slurm-24.11.5/1-mixed-squeue-format.txt")))
    assert [(str(row.id), row.job_id, row.state, row.reason, row.hosts, row.name) for row in rows] == [
        ("4", 4, JobState.HELD, "JobHeldUser", (), "wrap"),
        ("5+0", 5, JobState.RUNNING, "", ("n3",), "j.sh"),
        ("5+1", 6, JobState.RUNNING, "", ("n4",), "j.sh"),
        ("1", 1, JobState.RUNNING, "", ("n1", "n2"), 'odd | name = "x" é'),
    ]
    rows = parse_squeue(_squeue_24(recorded("slurm-24.11.5/3-node-failed-squeue-format.txt")))
    assert [(row.job_id, row.state, row.reason) for row in rows] == [
        (12, JobState.WAITING, "BeginTime"),
        (3, JobState.WAITING, "BeginTime"),
        (15, JobState.WAITING, "Dependency"),
        (4, JobState.HELD, "JobHeldUser"),
        (13, JobState.RUNNING, ""),
    ]
    assert rows[-1].end_time == "2026-11-30T14:59:13"


def test_an_array_that_was_cut_stands_for_the_whole(recorded: Recorded) -> None:
    row = parse_squeue(_squeue_24(recorded("slurm-24.11.5/4-after-squeue-format.txt")))[0]
    assert row.id == JobId(18)
    assert row.reason == "JobArrayTaskLimit,BeginTime"


def test_an_empty_queue_is_not_an_empty_answer(recorded: Recorded) -> None:
    assert parse_squeue(recorded("slurm-22.05.8/squeue-unknown-jobs.txt")) == []
    assert parse_squeue("CLUSTER: other\n" + _marked(SQUEUE_HEADER, [])) == []
    for text in ("", "\n", "garbage\n"):
        with pytest.raises(SlurmUnreachable, match="empty answer"):
            parse_squeue(text)


_row = ["7", "7", "RUNNING", "None", "1", "2026-11-30T14:56:50", "NONE", "n1", "", "(null)", "train"]


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, "", "not a job id"),
        (0, "x", "not a job id"),
        (1, "x", "invalid literal"),
        (2, "", "state is empty"),
        (4, "", "invalid literal"),
        (4, "1K", "invalid literal"),
        (7, "n[1-", "not closed"),
        (8, "n[2-1]", "backwards"),
    ],
)
def test_a_field_that_makes_no_sense_is_an_error_with_the_line(at: int, value: str, why: str) -> None:
    assert len(parse_squeue(_marked(SQUEUE_HEADER, [_row]))) == 1
    row = [*_row[:at], value, *_row[at + 1 :]]
    with pytest.raises(SlurmUnreachable, match=why) as caught:
        parse_squeue(_marked(SQUEUE_HEADER, [_row, row]))
    assert caught.value.answer == US.join(row)


def test_a_missing_column_or_header_is_an_error() -> None:
    with pytest.raises(SlurmUnreachable, match="10 columns instead of 11"):
        parse_squeue(_marked(SQUEUE_HEADER, [_row[1:]]))
    with pytest.raises(SlurmUnreachable, match="no header"):
        parse_squeue(_marked(_row, [_row]))
    assert len(SQUEUE_HEADER) == SQUEUE_FORMAT.count("%") == SQUEUE_FORMAT.count(US) + 1


def test_an_unknown_state_is_unknown_and_kept() -> None:
    (row,) = parse_squeue(_marked(SQUEUE_HEADER, [[*_row[:2], "DREAMING", *_row[3:]]]))
    assert (row.state, row.state_text) == (JobState.UNKNOWN, "DREAMING")


def test_separators_in_free_text_break_nothing() -> None:
    name = f"a{US}b{RS}c|d\n\ne"
    (row, other) = parse_squeue(_marked(SQUEUE_HEADER, [[*_row[:-1], name], _row]))
    assert (row.name, other.name) == (name, "train")


# --- sinfo


def test_sinfo_of_22_05(recorded: Recorded) -> None:
    rows = parse_sinfo(recorded("slurm-22.05.8/2-requeued-sinfo.txt"))
    assert [row.host for row in rows] == ["n1", "n2", "n3", "n4"]
    assert [row.facts.usable for row in rows] == [True, True, True, False]
    drained = rows[3]
    assert (drained.reason, drained.user, drained.state_text) == ("Admin: RMA 42 | disk", "root", "drain")
    assert drained.since.startswith("20")
    assert (rows[0].reason, rows[0].user, rows[0].since) == ("", "", "")


def test_sinfo_of_24_11(recorded: Recorded) -> None:
    rows = parse_sinfo(_sinfo_24(recorded("slurm-24.11.5/2-node-lost-sinfo.txt")))
    assert [(row.host, row.facts.usable, row.facts.responding, row.reason) for row in rows] == [
        ("n1", True, True, ""),
        ("n2", False, False, ""),
        ("n3", True, True, ""),
        ("n4", False, True, "Admin: RMA 42 | disk"),
    ]
    (lost,) = (r for r in parse_sinfo(_sinfo_24(recorded("slurm-24.11.5/3-node-failed-sinfo.txt"))) if r.host == "n2")
    assert (lost.facts.base, lost.reason, lost.user) == ("DOWN", "Not responding", "root")
    assert SINFO_FORMAT.count("%") == 5


def test_sinfo_without_an_answer() -> None:
    with pytest.raises(SlurmUnreachable, match="empty answer"):
        parse_sinfo("")


# --- sacct


def test_sacct_of_22_05(recorded: Recorded) -> None:
    rows = parse_sacct(recorded("slurm-22.05.8/2-requeued-sacct.txt"))
    lives = [(row.state, row.state_text) for row in rows if row.id == JobId(1)]
    assert lives == [(JobState.WAITING, "REQUEUED")]
    first = next(row for row in rows if row.id == JobId(1))
    assert first.name.endswith("\nand a second line")
    assert first.hosts == ("n1", "n2")
    (fails,) = (row for row in rows if row.name == "fails")
    assert (fails.state, fails.exit_code, fails.signal) == (JobState.ENDED_BADLY, 3, 0)
    (batch,) = (row for row in rows if str(row.id) == "1.batch")
    assert (batch.job_id, batch.signal) == (1, 15)
    assert any(row.state_text.startswith("CANCELLED by ") for row in rows)


def test_sacct_of_24_11(recorded: Recorded) -> None:
    rows = parse_sacct(_sacct_24(recorded("slurm-24.11.5/4-after-sacct.txt")))
    assert len(rows) == 24
    assert [(row.state, row.hosts) for row in rows if row.job_id == 12] == [
        (JobState.ENDED_BADLY, ("n1", "n2", "n3")),
        (JobState.RUNNING, ("n1", "n3", "n4")),
    ]
    (never,) = (row for row in rows if row.job_id == 7)
    assert (never.hosts, never.start_time, never.exit_code) == ((), "", 1)
    assert {row.name for row in rows} >= {"lost|no requeue", "odd | name = `x` é"}
    assert [row.job_id for row in rows if row.id == JobId(2, (20,))] == [2]


def test_a_step_of_a_lost_host_has_no_exit_code() -> None:
    header = SACCT_FIELDS.replace(",", US)
    row = US.join(["18_4.batch", "20.batch", "CANCELLED", "", "n2", "Unknown", "Unknown", "", "batch"])
    (step,) = parse_sacct(f"{header}\n{row}\n")
    assert (step.exit_code, step.signal, step.id.step) == (0, 0, "batch")


def test_sacct_without_an_answer(recorded: Recorded) -> None:
    with pytest.raises(SlurmUnreachable, match="empty answer"):
        parse_sacct("")
    with pytest.raises(SlurmUnreachable, match="1 columns instead of 9"):
        parse_sacct(recorded("slurm-24.11.5/sacct-database-down.txt"))


# --- scontrol show job


def test_show_job_of_22_05(recorded: Recorded) -> None:
    jobs = {job.job_id: job for job in parse_show_job(recorded("slurm-22.05.8/1-mixed-show-job.txt"))}
    odd = jobs[1]
    assert odd.name == 'odd | name = "x" é\nand a second line'
    assert odd.comment == "a|b c=1\nComment=x"
    assert (odd.std_out, odd.std_err) == ("/dev/null", "/dev/null")  # not what the comment says
    assert (odd.command, odd.work_dir) == ("/tmp/j.sh", "/tmp")
    assert (odd.state, odd.requeue, odd.restarts, odd.hosts) == (JobState.RUNNING, True, 0, ("n1", "n2"))
    assert (odd.batch_host, odd.partition, odd.nodes) == ("n1", "main", 2)
    assert odd.time_limit == timedelta(days=365)
    assert jobs[3].exc_hosts == ("n4",)
    assert jobs[3].state is JobState.HELD
    assert jobs[6].id.tasks == (1, 2, 4, 8, 16, 32, 64, *range(101, 400, 7))
    fails = next(job for job in jobs.values() if job.name == "fails")
    assert (fails.state, fails.reason, fails.command) == (JobState.ENDED_BADLY, "NonZeroExitCode", "/tmp/j.sh 0 3")


def test_a_requeued_job_in_its_two_moments(recorded: Recorded) -> None:
    for version, at_once in (("slurm-22.05.8", JobState.WAITING), ("slurm-24.11.5", JobState.RUNNING)):
        (dying,) = parse_show_job(recorded(f"{version}/requeued-completing.txt"))
        (waiting,) = parse_show_job(recorded(f"{version}/requeued-pending.txt"))
        assert (dying.state, dying.restarts) == (at_once, 1)  # COMPLETING, or that is over already
        assert (waiting.state, waiting.reason, waiting.restarts) == (JobState.WAITING, "BeginTime", 1)
        assert waiting.hosts == ()
        assert waiting.nodes == 2
        assert waiting.eligible_time > waiting.submit_time


def test_show_job_of_24_11(recorded: Recorded) -> None:
    jobs = parse_show_job(recorded("slurm-24.11.5/4-after-scontrol-jobs.txt"))
    by_number = {job.job_id: job for job in jobs}
    assert by_number[1].name == 'odd | name = "x" é'
    assert str(by_number[8].id) == "2_0"
    assert str(by_number[6].id) == "5+1"
    assert (by_number[16].failed_node, by_number[16].requeue, by_number[16].name) == ("n2", False, "lost|no requeue")
    assert by_number[12].failed_node == ""
    assert by_number[15].reason == "DependencyNeverSatisfied"
    assert by_number[13].time_limit == timedelta(minutes=1)
    assert by_number[1].time_limit is None
    assert by_number[18].id == JobId(18) or by_number[18].id.tasks is not None


@pytest.mark.parametrize("field", ["JobState", "Reason", "Requeue", "Restarts", "NodeList", "ExcNodeList", "NumNodes"])
def test_a_missing_field_is_an_error_that_names_it(recorded: Recorded, field: str) -> None:
    text = recorded("slurm-22.05.8/requeued-pending.txt")
    with pytest.raises(SlurmUnreachable, match=f"{field} is missing"):
        parse_show_job(text.replace(f" {field}=", " Other="))


@pytest.mark.parametrize("text", ["", "\n", "No jobs in the system\n", "JobId=1 JobName=x\n"])
def test_show_job_without_an_answer(text: str) -> None:
    with pytest.raises(SlurmUnreachable):
        parse_show_job(text)


def test_a_name_can_look_like_anything(recorded: Recorded) -> None:
    text = recorded("slurm-24.11.5/requeued-pending.txt")
    name = "x JobState=COMPLETED Reason=None\n\nRequeue=0 ExcNodeList=n1"
    (job,) = parse_show_job(text.replace('odd | name = "x" é', name))
    assert (job.name, job.state, job.exc_hosts, job.requeue) == (name, JobState.WAITING, (), True)
