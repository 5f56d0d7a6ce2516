"""SlurmCommands with stand-ins for Slurm's programs: arguments, environment, deadlines, and what answers mean."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.errors import SlurmError, SlurmMissing, SlurmRefused, SlurmUnreachable
from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.environment import clean_environment

Program = Callable[[str, str], Path]
RECORDED = Path(__file__).parents[1] / "recorded/slurm-22.05.8"


def lines(calls: Path) -> list[str]:
    return calls.read_text().removesuffix("\n").split("\n")  # splitlines() splits at our separators too


def say(name: str) -> str:
    """Script: print recorded output, with its exit status."""
    path = RECORDED / name
    failed = Path(f"{path}.exit").exists()
    return f"cat {path} >&{2 if failed else 1}; exit {int(failed)}"


@pytest.mark.usefixtures("program")
def test_no_slurm_on_this_machine() -> None:
    with pytest.raises(SlurmMissing, match="no Slurm on this machine: squeue not found") as caught:
        SlurmCommands().queue()
    assert caught.value.command == "squeue"
    assert caught.value.exit_code == 2


def test_queue_is_one_call(program: Program) -> None:
    calls = program("squeue", say("1-mixed-squeue.txt"))
    assert {row.job_id for row in SlurmCommands().queue()} >= {1, 2, 3, 6}
    SlurmCommands().queue([3, 1, 3])
    mine, some = lines(calls)
    assert mine.endswith(f"--user={os.getuid()}")
    assert some.endswith("--jobs=3,1")
    assert SlurmCommands().queue([]) == []
    assert len(lines(calls)) == 2


def test_an_unknown_job_is_just_absent(program: Program) -> None:
    program("squeue", say("squeue-unknown-job.txt"))
    assert SlurmCommands().queue([424242]) == []
    program("squeue", say("squeue-unknown-jobs.txt"))
    assert SlurmCommands().queue([424242, 424243]) == []
    program("scontrol", say("show-unknown-job.txt"))
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        SlurmCommands().show_job(424242)


UNREACHABLE = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "slurm_load_jobs error: Socket timed out on send/recv operation",
    "scontrol: error: fetch_config: DNS SRV lookup failed\nscontrol: fatal: Could not establish a configuration source",
    "error: Munge encode failed: Failed to access socket: No such file or directory",
    "slurm_load_jobs error: Zero Bytes were transmitted or received",
    "slurm_load_jobs error: Protocol authentication error",
    "something that nobody has seen before",
    "",
]


@pytest.mark.parametrize("answer", UNREACHABLE)
def test_no_answer_is_unknown(program: Program, answer: str) -> None:
    for name in ("squeue", "scontrol", "sinfo", "sacct"):
        program(name, f"cat >&2 <<'END'\n{answer}\nEND\nexit 1")
    slurm = SlurmCommands()
    questions = [slurm.queue, lambda: slurm.queue([1]), lambda: slurm.show_job(1), slurm.nodes, slurm.partitions]
    for question in [*questions, lambda: slurm.accounting([1])]:
        with pytest.raises(SlurmUnreachable) as caught:
            question()
        assert caught.value.answer == answer
        assert caught.value.code == 1
        assert (answer.splitlines() or ["no answer"])[-1] in str(caught.value)


def test_an_empty_answer_with_success_is_unknown(program: Program) -> None:
    for name in ("squeue", "scontrol", "sinfo", "sacct"):
        program(name, "exit 0")
    slurm = SlurmCommands()
    questions = [slurm.queue, lambda: slurm.show_job(1), slurm.nodes, slurm.partitions, slurm.version]
    for question in [*questions, lambda: slurm.accounting([1])]:
        with pytest.raises(SlurmUnreachable):
            question()


def test_a_database_that_is_down_is_unknown_though_the_exit_status_is_0(program: Program) -> None:
    down = Path(__file__).parents[1] / "recorded/slurm-24.11.5/sacct-database-down.txt"
    program("sacct", f"cat {down} >&2")
    with pytest.raises(SlurmUnreachable, match="Unable to connect to database"):
        SlurmCommands().accounting([1])


def test_no_accounting_at_all_is_an_answer(program: Program) -> None:
    program("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    with pytest.raises(SlurmRefused, match="accounting storage is disabled"):
        SlurmCommands().accounting([1])


def test_accounting(program: Program) -> None:
    calls = program("sacct", say("2-requeued-sacct.txt"))
    assert any(row.state_text == "REQUEUED" for row in SlurmCommands().accounting([1]))
    SlurmCommands().accounting([1, 2], duplicates=False)
    first, second = lines(calls)
    assert "--duplicates" in first
    assert "--duplicates" not in second
    assert second.endswith("--jobs=1,2")
    assert SlurmCommands().accounting([]) == []


@pytest.mark.parametrize(
    "answer",
    [
        "Job is no longer pending execution for job 1",
        "Job is pending execution for job 3",
        "Requested operation is presently disabled for job 10",
        "Only batch jobs are accepted or processed for job 1",
        "Invalid job id specified for job 424242",
        "slurm_update error: Invalid user id",
        "Job has already finished for job 7",
        "2_0: Access/permission denied",
    ],
)
def test_refusals(program: Program, answer: str) -> None:
    program("scontrol", f"echo '{answer}' >&2; exit 1")
    slurm = SlurmCommands()
    for change in (slurm.requeue, slurm.release_now, lambda job: slurm.exclude(job, ["n1"])):
        with pytest.raises(SlurmRefused) as caught:
            change(1)
        assert (caught.value.answer, caught.value.code) == (answer, 1)


def test_a_change_with_an_answer_nobody_has_seen_is_neither(program: Program) -> None:
    program("scontrol", "echo 'the moon is full' >&2; exit 1")
    with pytest.raises(SlurmError, match="the moon is full") as caught:
        SlurmCommands().requeue(1)
    assert type(caught.value) is SlurmError


def test_a_change_that_fails_without_a_word_is_unknown(program: Program) -> None:
    program("scontrol", "exit 1")
    with pytest.raises(SlurmUnreachable, match="scontrol requeue: no answer"):
        SlurmCommands().requeue(1)


def test_a_program_that_hangs_is_killed_and_reaped_with_its_children(program: Program, tmp_path: Path) -> None:
    program("scontrol", f"sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/self; wait")
    started = time.monotonic()
    with pytest.raises(SlurmUnreachable, match=r"scontrol gave no answer in 0.5 s") as caught:
        SlurmCommands(0.5).requeue(1)
    assert time.monotonic() - started < 5
    assert caught.value.command == "scontrol requeue 1"
    for name in ("self", "child"):
        pid = int((tmp_path / name).read_text())
        deadline = time.monotonic() + 5
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(pid), name


def _alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_the_environment_that_slurms_programs_get(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leaks = (
        "SLURM_JOB_ID SBATCH_PARTITION SQUEUE_FORMAT SINFO_FORMAT SACCT_FORMAT PMIX_RANK PMI_RANK OMPI_COMM_WORLD_SIZE"
    )
    for name in leaks.split():
        monkeypatch.setenv(name, "leak")
    kept = {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CLUSTERS": "one", "MY_OWN": "1"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    program("squeue", f"env > {tmp_path}/env; {say('squeue-unknown-jobs.txt')}")
    SlurmCommands().queue()
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert "leak" not in seen.values()
    assert kept.items() <= seen.items()
    answers = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    assert answers.items() <= seen.items()
    clean = clean_environment(os.environ)
    assert kept.items() <= clean.items()
    assert clean["LC_ALL"] == "de_DE.UTF-8"  # a job gets the user's own language
    assert not set(leaks.split()) & set(clean)
    assert os.environ["SLURM_JOB_ID"] == "leak"  # and ours is left alone


def test_a_batch_script_is_submitted_as_it_stands(program: Program, tmp_path: Path) -> None:
    seen = tmp_path / "env"
    calls = program("sbatch", f"env > {seen}; echo 'Welcome to the 5th cluster'; echo '123;one'")
    script = tmp_path / "my job.sh"
    asked, own = ["--nodes=2"], {"PATH": os.environ["PATH"], "MY_OWN": "1"}
    assert SlurmCommands().submit(asked, script, ["a b", "c"], own) == 123
    assert lines(calls) == [f"--parsable --nodes=2 {script} a b c"]
    inherited = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert inherited["MY_OWN"] == "1"
    assert not {"LC_ALL", "SLURM_TIME_FORMAT"} & set(inherited), "what we ask for in answers is nothing for a job"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", SlurmRefused),
        ("echo 'sbatch: error: Your site says that Tuesdays are for others' >&2; exit 1", SlurmRefused),
        ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", SlurmUnreachable),
        ("exit 0", SlurmUnreachable),
        ("echo 'Submitted, more or less'", SlurmUnreachable),
    ],
)
def test_sbatch_that_gives_no_job(program: Program, tmp_path: Path, answer: str, kind: type[SlurmError]) -> None:
    program("sbatch", answer)
    with pytest.raises(SlurmError) as caught:
        SlurmCommands().submit([], tmp_path / "job.sh", [], {"PATH": os.environ["PATH"]})
    assert type(caught.value) is kind


def test_the_batch_script_of_a_job(program: Program) -> None:
    calls = program("scontrol", "echo '#!/bin/bash'; echo 'exec true'")
    assert SlurmCommands().script(7) == "#!/bin/bash\nexec true\n"
    assert lines(calls) == ["write batch_script 7 -"]
    program("scontrol", "echo 'job script retrieval failed: Invalid job id specified' >&2; exit 1")
    with pytest.raises(SlurmRefused):
        SlurmCommands().script(7)


def test_nodes_of_a_partition(program: Program) -> None:
    calls = program("sinfo", say("1-mixed-sinfo.txt"))
    SlurmCommands().nodes(partition="main")
    assert " --partition=main" in lines(calls)[0]
    SlurmCommands().nodes()
    assert "--partition" not in lines(calls)[1]


JOB_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


@pytest.mark.parametrize("ignore_term", [False, True])
@pytest.mark.parametrize("in_thread", [False, True])
def test_the_signals_that_end_a_job_do_not_end_even_a_script(
    program: Program, tmp_path: Path, ignore_term: bool, in_thread: bool
) -> None:
    status = tmp_path / "status"
    program("scontrol", f"cat /proc/$$/status > {status}.new; mv {status}.new {status}; exec sleep 0.6")
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(SlurmCommands(10, ignore_term=ignore_term).requeue(1))
        except SlurmUnreachable as error:
            outcome.append(str(error))

    def hurt() -> None:
        while not status.exists():
            time.sleep(0.01)
        pid = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("Pid:"))
        os.kill(pid, signal.SIGTERM)

    sender = threading.Thread(target=hurt)
    sender.start()
    if in_thread:
        asker = threading.Thread(target=ask)
        asker.start()
        asker.join()
    else:
        ask()
    sender.join()
    assert outcome == [None if ignore_term else "scontrol requeue: ended by signal 15"]
    mask = next(line for line in status.read_text().splitlines() if line.startswith("SigIgn"))
    ignored = {one for one in JOB_SIGNALS if int(mask.split()[1], 16) >> (one - 1) & 1}
    assert ignored == (JOB_SIGNALS if ignore_term else set())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & JOB_SIGNALS  # and ours are as they were


def test_there_is_no_moment_without_protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes as soon as there is a child, many times over."""
    real = tmp_path / "scontrol"
    real.symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        child = popen(*args, **kwargs)
        os.kill(child.pid, signal.SIGTERM)
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    for _ in range(30):
        SlurmCommands(10, ignore_term=True).requeue(1)


SHOW = (RECORDED / "requeued-pending.txt").read_text()


def _show(tmp_path: Path, excluded: str) -> str:
    path = tmp_path / f"show-{excluded}"
    path.write_text(SHOW.replace("ExcNodeList=(null)", f"ExcNodeList={excluded}"))
    return f"cat {path}"


def test_exclude_writes_and_reads_back(program: Program, tmp_path: Path) -> None:
    calls = program("scontrol", f'case "$1" in show) {_show(tmp_path, "n[2-3]")};; esac')
    assert SlurmCommands().exclude(1, ["n3", "n2", "n3"]) == []
    assert lines(calls) == ["update JobId=1 ExcNodeList=n[2-3]", "show job 1"]


def test_an_accepted_exclusion_that_is_not_there_is_refused(program: Program, tmp_path: Path) -> None:
    program("scontrol", f'case "$1" in show) {_show(tmp_path, "n3")};; esac')
    with pytest.raises(SlurmRefused, match="does not exclude n2 although Slurm accepted it") as caught:
        SlurmCommands().exclude(1, ["n2", "n3"])
    assert caught.value.answer == "ExcNodeList=n3"


def test_hosts_that_are_no_nodes_are_dropped(program: Program, tmp_path: Path) -> None:
    calls = program(
        "scontrol",
        f'case "$*" in show*) {_show(tmp_path, "n2")};; *99*) {say("user-exclude-unknown-node.txt")};; esac',
    )
    asked = program("sinfo", say("1-mixed-sinfo.txt"))
    assert SlurmCommands().exclude(1, ["n2", "n99"]) == ["n99"]
    assert "ExcNodeList=n2\n" in calls.read_text()
    assert asked.read_text().rstrip().endswith("--nodes=n[2,99]")


def test_only_hosts_that_are_no_nodes_leaves_the_list_as_it_is(program: Program) -> None:
    calls = program("scontrol", say("user-exclude-unknown-node.txt"))
    program("sinfo", say("1-mixed-sinfo.txt"))
    assert SlurmCommands().exclude(1, ["n99"]) == ["n99"]
    assert lines(calls) == ["update JobId=1 ExcNodeList=n99"]


def test_a_failed_question_drops_nobody(program: Program) -> None:
    program("scontrol", say("user-exclude-unknown-node.txt"))
    program("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmUnreachable):
        SlurmCommands().exclude(1, ["n2", "n99"])


def test_nodes_partitions_and_version(program: Program) -> None:
    calls = program(
        "sinfo", f'case "$*" in *%R*) echo PARTITION; echo main; echo debug;; *) {say("1-mixed-sinfo.txt")};; esac'
    )
    program("squeue", "echo slurm-wlm 22.05.8")
    slurm = SlurmCommands()
    assert [row.host for row in slurm.nodes()] == ["n1", "n2", "n3", "n4"]
    assert slurm.nodes([]) == []
    assert slurm.partitions() == ["main", "debug"]
    assert slurm.version() == "22.05.8"
    assert len(lines(calls)) == 2


def test_cancel_leaves_an_ended_job_alone_but_not_a_refusal(program: Program) -> None:
    program(
        "scancel", "echo 'scancel: error: Kill job error on job id 4: Job/step already completing or completed' >&2"
    )
    SlurmCommands().cancel(4)
    program("scancel", "echo 'scancel: error: Kill job error on job id 3: Access/permission denied' >&2")
    with pytest.raises(SlurmRefused, match="denied"):  # its exit status is 0
        SlurmCommands().cancel(3)


def test_signals_go_to_a_step_or_to_the_batch_script(program: Program) -> None:
    calls = program("scancel", "")
    slurm = SlurmCommands()
    slurm.signal_step(7, 0, "USR1")
    slurm.signal_step(7, "batch", "SIGTERM")
    assert lines(calls) == ["--signal=USR1 7.0", "--signal=TERM --batch 7"]


def test_show_job_picks_the_task_that_has_the_number(program: Program) -> None:
    program("scontrol", say("1-mixed-show-job.txt"))
    assert str(SlurmCommands().show_job(7).id) == "2_0"
    assert SlurmCommands().show_job(2).id.job == 2
