import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.slurm.states import JobState, NodeFacts, job_state, node_state

JOBS = {
    JobState.WAITING: "PENDING PD CONFIGURING CF REQUEUED RQ REQUEUE_FED RF SUSPENDED S STOPPED ST POWER_UP_NODE",
    JobState.RUNNING: "RUNNING R COMPLETING CG STAGE_OUT SO SIGNALING SI RESIZING RS",
    JobState.ENDED_WELL: "COMPLETED CD",
    JobState.ENDED_BADLY: "CANCELLED CA FAILED F TIMEOUT TO NODE_FAIL NF PREEMPTED PR BOOT_FAIL BF DEADLINE DL "
    "OUT_OF_MEMORY OOM",
    JobState.HELD: "REQUEUE_HOLD RH SPECIAL_EXIT SE RESV_DEL_HOLD RD",
    JobState.UNKNOWN: "REVOKED RV NEW_STATE ? LAUNCH_FAILED",
}


@pytest.mark.parametrize(("word", "state"), [(w, state) for state, words in JOBS.items() for w in words.split()])
def test_every_word_of_slurms(word: str, state: JobState) -> None:
    assert job_state(word) is state
    assert job_state(f" {word.lower()} ") is state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.ENDED_BADLY),
        ("CANCELLED by alice", JobState.ENDED_BADLY),
        ("CANCELLED+", JobState.ENDED_BADLY),
        ("OUT_OF_ME+", JobState.ENDED_BADLY),
        ("NODE_FAI+", JobState.ENDED_BADLY),
        ("REQUEUE_H+", JobState.HELD),
        ("COMPLETED+", JobState.ENDED_WELL),
        ("COMPLETI+", JobState.RUNNING),
        ("COMPLET+", JobState.UNKNOWN),  # COMPLETED or COMPLETING
        ("REQUEUE+", JobState.UNKNOWN),  # REQUEUED or REQUEUE_HOLD
        ("+", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
        ("COMPLETE", JobState.UNKNOWN),
        ("COMPLETED WRONGLY", JobState.UNKNOWN),
    ],
)
def test_suffixes_and_forms_that_a_column_cut(text: str, state: JobState) -> None:
    assert job_state(text) is state


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["RUNNING", "COMPLETING"], JobState.RUNNING),
        (["COMPLETED", "COMPLETING"], JobState.RUNNING),  # processes may be alive
        (["PENDING", "COMPLETING"], JobState.RUNNING),
        (["PENDING", "REQUEUED"], JobState.WAITING),
        (["FAILED", "REQUEUED"], JobState.WAITING),
        (["RUNNING", "CONFIGURING"], JobState.WAITING),
        (["PENDING", "REQUEUE_HOLD"], JobState.HELD),
        (["PENDING", "LAUNCH_FAILED"], JobState.WAITING),
        (["FAILED", "LAUNCH_FAILED"], JobState.ENDED_BADLY),
        (["RUNNING", "NEW_MARK"], JobState.RUNNING),
        (["COMPLETED", "NEW_MARK"], JobState.UNKNOWN),  # never done on a word that we do not know
        (["CANCELLED", "NEW_MARK"], JobState.UNKNOWN),
        ([], JobState.UNKNOWN),
    ],
)
def test_lists(words: list[str], state: JobState) -> None:
    assert job_state(words) is state
    assert job_state(list(reversed(words))) is state
    assert job_state("+".join(words)) is state
    assert job_state(",".join(words)) is state


@pytest.mark.parametrize(
    "reason",
    [
        "JobHeldUser",
        "JobHeldAdmin",
        "(JobHeldUser)",
        "launch_failed_requeued_held",
        "launch failed requeued held",
        "job_requeued_in_held_state",
        "user_env_retrieval_failed_requeued_held",
        "JobHeldUser,Dependency",
    ],
)
def test_the_reason_tells_a_held_job(reason: str) -> None:
    assert job_state("PENDING", reason) is JobState.HELD
    assert job_state("PD", reason) is JobState.HELD
    assert job_state("RUNNING", reason) is JobState.RUNNING
    assert job_state("COMPLETED", reason) is JobState.ENDED_WELL


@pytest.mark.parametrize(
    "reason", ["BeginTime", "Priority", "None", "", "ReqNodeNotAvail, UnavailableNodes:held1", "Dependency"]
)
def test_other_reasons_do_not(reason: str) -> None:
    assert job_state("PENDING", reason) is JobState.WAITING


_known = st.sampled_from([word for words in JOBS.values() for word in words.split()])
_ended = {JobState.ENDED_WELL, JobState.ENDED_BADLY}


@given(st.text(max_size=20), st.text(max_size=10))
def test_no_text_that_is_not_in_the_table_is_an_end(text: str, reason: str) -> None:
    words = {word for state in _ended for word in JOBS[state].split()}
    if job_state(text, reason) in _ended:
        first = re.split(r"[\s,+]", text.strip().upper())[0]
        assert any(word.startswith(first) for word in words)


@given(st.lists(_known, max_size=4), st.text("ABCXYZ_", min_size=7, max_size=9).map(lambda text: f"X{text}"))
def test_a_strange_word_never_makes_an_end(words: list[str], strange: str) -> None:
    assert job_state([*words, strange]) not in _ended


NODES = {
    # As sinfo prints them, short and long.
    "idle": ("IDLE", "", True, True),
    "mix": ("MIXED", "", True, True),
    "allocated": ("ALLOCATED", "", True, True),
    "alloc+": ("ALLOCATED", "COMPLETING", True, True),
    "mix*": ("MIXED", "NOT_RESPONDING", False, False),
    "down*": ("DOWN", "NOT_RESPONDING", False, False),
    "down~": ("DOWN", "POWERED_DOWN", False, None),
    "idle~": ("IDLE", "POWERED_DOWN", True, None),
    "idle#": ("IDLE", "POWERING_UP", True, None),
    "idle%": ("IDLE", "POWERING_DOWN", None, None),
    "idle!": ("IDLE", "POWER_DOWN", None, True),
    "idle$": ("IDLE", "MAINTENANCE", None, True),
    "mix@": ("MIXED", "REBOOT_REQUESTED", True, True),
    "down^": ("DOWN", "REBOOT_ISSUED", False, None),
    "mix-": ("MIXED", "PLANNED", True, True),
    "drain": ("DRAINED", "DRAIN", False, True),
    "drained*": ("DRAINED", "DRAIN NOT_RESPONDING", False, False),
    "drng": ("DRAINING", "DRAIN", False, True),
    "fail": ("FAIL", "FAIL", False, True),
    "failg": ("FAILING", "FAIL", False, True),
    "comp": ("COMPLETING", "COMPLETING", True, True),
    "inval": ("INVAL", "INVALID_REG", False, True),
    "resv": ("RESERVED", "RESERVED", None, True),
    "maint": ("MAINT", "MAINTENANCE", None, True),
    "plnd": ("PLANNED", "PLANNED", True, True),
    "unk*": ("UNKNOWN", "NOT_RESPONDING", False, False),
    "unk": ("UNKNOWN", "", None, None),
    "futr": ("FUTURE", "", False, None),
    "reboot^": ("REBOOT_ISSUED", "REBOOT_ISSUED", False, None),
    # As scontrol prints them.
    "IDLE+DRAIN": ("IDLE", "DRAIN", False, True),
    "MIXED+NOT_RESPONDING": ("MIXED", "NOT_RESPONDING", False, False),
    "DOWN+DRAIN+NOT_RESPONDING": ("DOWN", "DRAIN NOT_RESPONDING", False, False),
    "IDLE+CLOUD+POWERED_DOWN": ("IDLE", "CLOUD POWERED_DOWN", True, None),
    "DOWN*+DRAIN": ("DOWN", "DRAIN NOT_RESPONDING", False, False),
    # What we do not know.
    "IDLE+NEW": ("IDLE", "NEW", None, None),
    "strange": ("STRANGE", "STRANGE", None, None),
    "": ("UNKNOWN", "", None, None),
}


@pytest.mark.parametrize(("text", "facts"), NODES.items())
def test_nodes(text: str, facts: tuple[str, str, bool | None, bool | None]) -> None:
    base, flags, usable, responding = facts
    assert node_state(text) == NodeFacts(base, frozenset(flags.split()), usable, responding)


def test_nodes_as_json_lists() -> None:
    assert node_state(["DOWN", "NOT_RESPONDING"]) == node_state("DOWN+NOT_RESPONDING")


def test_recorded_nodes(recorded: Callable[[str], str]) -> None:
    states = re.findall(r"State=(\S+)", recorded("slurm-24.11.5/2-node-lost-scontrol-nodes.txt"))
    assert [(node_state(text).usable, node_state(text).responding) for text in states] == [
        (True, True),
        (False, False),
        (True, True),
        (False, True),
    ]
