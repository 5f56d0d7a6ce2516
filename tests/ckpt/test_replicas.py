"""Who keeps whose copies, and what is brought where after a loss: for any hosts, switches and losses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt.replicas import Item, gather, holders, room, superfluous, switch_of

HOSTS = [f"n{i}" for i in range(12)]


def item(host: str, rank: int, step: int, copy: bool = False, attempt: str = "A1", world_size: int = 3) -> Item:
    whose = f"0000aaaa-rank-{rank:05d}."
    return Item(host, f"{'copy.' if copy else ''}{whose}{attempt}.0", whose, rank, world_size, step, attempt, copy)


def test_a_ring() -> None:
    assert holders(HOSTS[:3], HOSTS[3:4], {}, 1, 1).of == {"n0": ("n1",), "n1": ("n2",), "n2": ("n3",)}
    assert holders(HOSTS[:3], (), {}, 2, 2).of == {"n0": ("n2", "n1"), "n1": ("n0", "n2"), "n2": ("n1", "n0")}
    assert holders(HOSTS[:4], (), {}, 1, 6).of["n0"] == ("n2",), "the distance goes round"


def test_one_host_and_no_copies() -> None:
    assert holders(["n0"], (), {}, 1, 1).of == {"n0": ()}
    found = holders(HOSTS[:3], (), {}, 0, 1)
    assert (set(found.of.values()), found.complaint) == ({()}, "")


def test_too_few_are_told() -> None:
    assert holders(HOSTS[:2], (), {}, 3, 1).complaint == "2 hosts can't keep 3 copies of each other's memory: 1 it is"
    same = dict.fromkeys(HOSTS[:3], "leaf1")
    found = holders(HOSTS[:3], (), same, 1, 1)
    assert found.complaint == "too few switches: copies of n0, n1, n2 share one"
    assert all(found.of.values()), "the best that there is"


@given(
    serving=st.integers(1, 8),
    spares=st.integers(0, 4),
    on=st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=12, max_size=12),
    copies=st.integers(0, 4),
    distance=st.integers(1, 9),
)
def test_holders(serving: int, spares: int, on: list[str], copies: int, distance: int) -> None:
    ranked, spare = HOSTS[:serving], HOSTS[serving : serving + spares]
    switches = {host: name for host, name in zip(HOSTS, on, strict=True) if name}
    found = holders(ranked, spare, switches, copies, distance)
    everybody = [*ranked, *spare]
    assert list(found.of) == ranked
    crowded = False
    for host, kept in found.of.items():
        assert len(kept) == len(set(kept)) == min(copies, len(everybody) - 1)
        assert host not in kept
        assert set(kept) <= set(everybody)
        used = [switches.get(name, name) for name in (host, *kept)]
        others = {switches.get(name, name) for name in everybody} - {used[0]}
        if len(others) >= len(kept):
            assert len(set(used)) == len(used), "no two under one switch"
        else:
            crowded = True
            assert len(set(used)) == len(others) + 1, "as many switches as there are"
    assert crowded == found.complaint.startswith("too few switches")
    if not switches and not spare:
        load = Counter(name for kept in found.of.values() for name in kept)
        assert set(load.values()) <= {min(copies, serving - 1)}, "everybody keeps as much"


def test_slurms_name_of_a_switch() -> None:
    assert switch_of("core.leaf3.n17") == "core.leaf3"
    assert switch_of("n17") == ""
    assert switch_of("") == ""


def test_a_lost_hosts_rank_comes_from_the_copy() -> None:
    items = [
        item("n0", 0, 5),
        item("n2", 2, 5),
        item("n2", 1, 5, copy=True),
        item("n0", 2, 5, copy=True),
        item("n0", 0, 4),
        item("n2", 2, 4),
        item("n2", 1, 4, copy=True),
    ]
    found = gather(items, ["n0", "n3", "n2"], {})
    assert [(move.item.host, move.item.rank, move.target) for move in found.moves] == [("n2", 1, "n3")]
    assert (found.steps, found.lost) == ({"0000aaaa": 5}, {})


def test_a_spare_that_has_the_copy_only_renames_it() -> None:
    items = [item("n0", 0, 5), item("n3", 1, 5, copy=True), item("n2", 2, 5), item("n2", 1, 5, copy=True)]
    found = gather(items, ["n0", "n3", "n2"], {})
    assert [(move.item.host, move.target) for move in found.moves] == [("n3", "n3")]


def test_an_older_step_that_all_have_beats_a_newer_one_that_is_lost() -> None:
    items = [item("n0", 0, 6), item("n2", 2, 6), *(item(f"n{r}", r, 5) for r in (0, 2)), item("n0", 1, 5, copy=True)]
    found = gather(items, ["n0", "n3", "n2"], {})
    assert found.steps == {"0000aaaa": 5}
    assert found.lost == {"0000aaaa": "no memory has step 6 of rank 1"}
    assert gather(items, ["n0", "n3", "n2"], {"0000aaaa": 6}).moves == (), "a newer one is on disk"
    assert gather(items, ["n0", "n3", "n2"], {"0000aaaa": 7}).lost == {}, "nothing in memory is of use"


def test_other_world_sizes_are_left_alone() -> None:
    items = [item(f"n{r}", r, 5, world_size=4) for r in range(4)]
    assert gather(items, ["n0", "n1", "n2"], {}).moves == ()


@given(st.data())
def test_gathering_any_memory(data: st.DataObject) -> None:
    """What is left after the moves is a step that every rank has at home, and there is no newer one."""
    ranks = data.draw(st.integers(1, 4))
    hosts = HOSTS[:6]
    homes = [data.draw(st.sampled_from(hosts)) for _ in range(ranks)]
    made = st.tuples(
        st.sampled_from(hosts),
        st.integers(0, ranks - 1),
        st.integers(0, 3),
        st.booleans(),
        st.sampled_from(["A1", "A2"]),
    )
    items = [item(h, r, s, c, a, ranks) for h, r, s, c, a in data.draw(st.lists(made, max_size=30))]
    floor = data.draw(st.integers(-1, 3))
    found = gather(items, homes, {"0000aaaa": floor})
    keys = {(i.step, i.attempt) for i in items}
    whole = [k for k in keys if {i.rank for i in items if (i.step, i.attempt) == k} == set(range(ranks))]
    whole = [k for k in whole if k[0] >= floor]
    assert found.steps == ({"0000aaaa": max(whole)[0]} if whole else {})
    if whole:
        at_home = {
            i.rank for i in items if (i.step, i.attempt) == max(whole) and i.host == homes[i.rank] and not i.copy
        }
        moved = [move.item.rank for move in found.moves]
        assert sorted([*at_home, *moved]) == list(range(ranks)), "each is there once, none is moved for nothing"
        assert all(homes[move.item.rank] == move.target for move in found.moves)
    assert bool(found.lost) == bool(keys and max(keys)[0] >= floor and max(keys) not in whole)


def test_superfluous() -> None:
    mine = [item("n0", 1, 4, copy=True), item("n0", 1, 5, copy=True), item("n0", 2, 4, copy=True), item("n0", 0, 4)]
    kept = ["0000aaaa-rank-00002."]
    assert superfluous(mine, kept, 5) == [mine[0]]
    assert superfluous(mine, kept, 6) == mine[:2]


@pytest.mark.parametrize(
    ("configured", "own", "copies", "expected"),
    [
        (None, {}, 0, 1000),
        (None, {"a": [100]}, 0, 900),  # its second slot is left to it
        (None, {"a": [100, 100], "b": [300]}, 50, 700),
        (500, {"a": [100, 100]}, 50, 250),
        (250, {"a": [100, 100]}, 50, 0),
        (None, {"a": [2000]}, 0, 0),
    ],
)
def test_room(configured: int | None, own: dict[str, list[int]], copies: int, expected: int) -> None:
    assert room(1000, configured, own, copies, len(own), 2, 60) == expected
    assert room(1000, configured, own, copies, len(own) + 1, 2, 60) == max(0, expected - 120), (
        "a rank without slots yet"
    )
