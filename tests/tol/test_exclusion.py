from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.tol.causes import Cause
from transom_hpc.tol.exclusion import LIFETIME, Incident, choose

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


def incident(
    host: str, cause: Cause = Cause.HOST_SILENT, age: timedelta = timedelta(hours=1), attempt: int = 1
) -> Incident:
    return Incident(host, cause, "evidence", NOW - age, attempt)


def names(incidents: tuple[Incident, ...]) -> list[str]:
    return [item.host for item in incidents]


def test_without_knowing_the_cluster_all_are_avoided() -> None:
    choice = choose([incident("n1"), incident("n2")], NOW)
    assert sorted(names(choice.avoid)) == ["n1", "n2"]
    assert choice.let_back == ()


def test_never_more_than_leaves_room() -> None:
    choice = choose([incident("n1"), incident("n2", Cause.HOST_LOST)], NOW, usable={"n1", "n2", "n3", "n4"}, needed=3)
    assert names(choice.avoid) == ["n2"], "the strongest evidence stays"
    assert names(choice.let_back) == ["n1"]


def test_a_host_that_is_down_takes_no_room() -> None:
    choice = choose([incident("n1"), incident("n2")], NOW, usable={"n1", "n3", "n4"}, needed=2)
    assert sorted(names(choice.avoid)) == ["n1", "n2"]


def test_old_evidence_counts_no_more() -> None:
    choice = choose([incident("n1", age=LIFETIME), incident("n2")], NOW)
    assert names(choice.avoid) == ["n2"]
    assert names(choice.let_back) == ["n1"]


def test_the_newest_incident_of_a_host_counts() -> None:
    choice = choose([incident("n1", age=LIFETIME), incident("n1")], NOW)
    assert names(choice.avoid) == ["n1"]


def test_nothing_known() -> None:
    assert choose([], NOW, usable=set(), needed=4) == choose([], NOW)


@given(
    st.lists(st.sampled_from(["n1", "n2", "n3", "n4", "n5"])),
    st.sets(st.sampled_from(["n1", "n2", "n3", "n4", "n5"])),
    st.integers(0, 6),
)
def test_room_is_left_whatever_comes(hosts: list[str], usable: set[str], needed: int) -> None:
    choice = choose([incident(host) for host in hosts], NOW, usable=usable, needed=needed)
    left = usable - set(names(choice.avoid))
    assert len(left) >= min(needed, len(usable))
    assert {*names(choice.avoid), *names(choice.let_back)} == set(hosts)
