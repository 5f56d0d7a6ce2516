import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_hpc.base.errors import HostListError, UsageError
from transom_hpc.slurm.hosts import MAX_HOSTS, expand_hosts, fold_hosts

needs_scontrol = pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm's scontrol is not on this machine")

READ = {
    "n1": ["n1"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[1-3],n2": ["n1", "n2", "n3", "n2"],
    "rack[0-1]n[01-02]": ["rack0n01", "rack0n02", "rack1n01", "rack1n02"],
    "b04-[09-10]": ["b04-09", "b04-10"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[9-11]": ["n9", "n10", "n11"],
    "node[001-003,007]": ["node001", "node002", "node003", "node007"],
    "n1 n2": ["n1", "n2"],
    " n1,, n[2-3], ": ["n1", "n2", "n3"],
    "n[08-8]": ["n08"],
    "n[1-2]n[3-4]n[5-6]": ["n1n3n5", "n1n3n6", "n2n3n5", "n2n3n6", "n1n4n5", "n1n4n6", "n2n4n5", "n2n4n6"],
    "tux0-tux3": ["tux0-tux3"],
    "a.b-c_d:e": ["a.b-c_d:e"],
}

# What other tools write and Slurm 22.05 itself refuses.
READ_MORE = {
    "n[1-3]-ib0": ["n1-ib0", "n2-ib0", "n3-ib0"],
    "tux[0-2].cluster.org": ["tux0.cluster.org", "tux1.cluster.org", "tux2.cluster.org"],
}

BAD = {
    "n[003-001]": "003-001",
    "n[1-": "n[1-",
    "node[001-003,007],gpu-[1-2]-[a..]": "a..",
    "n1]": "n1]",
    "a,n[[1-2]]": "n[[",
    "n[]": "",
    "n[1-3,]": "",
    "n[1-2-3]": "1-2-3",
    "n[1 - 3]": "1 - 3",
    "n[-3]": "-3",
    "n[1-99999999999]": "n[1-99999999999]",
    "n[0-999][0-999]": "n[0-999][0-999]",
    "n[1-1000000000000000000000000]": "1-1000000000000000000000000",
    "n1;reboot": "n1;reboot",
    "n1,$(x)": "$(x)",
    "n\N{SUPERSCRIPT TWO}": "n\N{SUPERSCRIPT TWO}",
    "n[\N{ARABIC-INDIC DIGIT ONE}]": "\N{ARABIC-INDIC DIGIT ONE}",
}


@pytest.mark.parametrize(("text", "names"), [*READ.items(), *READ_MORE.items()])
def test_expand(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize("text", ["", " ", "None assigned", "none assigned", "(null)", "None", "N/A", ",", "(null),"])
def test_no_host_at_all(text: str) -> None:
    assert expand_hosts(text) == []


def test_no_host_among_others_is_no_host() -> None:
    assert expand_hosts("n1,(null),None assigned, n2") == ["n1", "n2"]


@pytest.mark.parametrize(("text", "part"), BAD.items())
def test_errors_name_the_bad_part(text: str, part: str) -> None:
    with pytest.raises(HostListError) as caught:
        expand_hosts(text)
    assert caught.value.part == part
    assert caught.value.text == text
    assert repr(part) in str(caught.value)
    assert isinstance(caught.value, UsageError)


def test_a_list_that_would_fill_the_memory_is_refused_at_once() -> None:
    started = time.process_time()
    for text in ("n[0-99999999999999]", "a[0-99999]b[0-99999]c[0-99999]", ",".join(["n[1-99999]"] * 4)):
        with pytest.raises(HostListError, match=f"more than {MAX_HOSTS} hosts"):
            expand_hosts(text)
    assert time.process_time() - started < 3
    assert len(expand_hosts(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n10", "n2", "n1", "n1"], "n[1-2,10]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n099", "n100", "n9"], "n[9,099-100]"),
        (["n01", "n1", "n2"], "n[01,1-2]"),
        (["n1-ib0", "n2-ib0"], "n1-ib0,n2-ib0"),
        (["r1n2", "r0n1", "r0n2"], "r0n[1-2],r1n2"),
        (["n", "n1", "n3"], "n,n[1,3]"),
        (["b", "a"], "a,b"),
        (["n99999999999999999999", "n1"], "n1,n99999999999999999999"),
    ],
)
def test_fold(names: list[str], text: str) -> None:
    assert fold_hosts(names) == text


@pytest.mark.parametrize("name", ["", "n[1-2]", "n1,n2", "n 1", "(null)", "n1\n", "None assigned"])
def test_fold_takes_host_names_only(name: str) -> None:
    with pytest.raises(HostListError) as caught:
        fold_hosts(["n1", name])
    assert caught.value.part == name


def test_a_range_longer_than_slurm_takes_is_split() -> None:
    names = [f"n{number}" for number in range(1, 70_000)]
    assert fold_hosts(names) == "n[1-65536,65537-69999]"


_piece = st.text("abn-.", max_size=3)
_number = st.integers(0, 120).flatmap(lambda n: st.integers(1, 4).map(lambda width: f"{n:0{width}d}"))
_name = st.builds(lambda head, number, tail: f"n{head}{number}{tail}", _piece, _number, st.sampled_from(["", "", "x"]))


@st.composite
def _span(draw: st.DrawFn) -> str:
    low = draw(st.integers(0, 110))
    width = draw(st.integers(1, 3))
    return f"{low:0{width}d}" + (f"-{low + draw(st.integers(0, 12)):0{width}d}" if draw(st.booleans()) else "")


_bracket = st.lists(_span(), min_size=1, max_size=3).map(lambda spans: f"[{','.join(spans)}]")
_entry = st.lists(st.tuples(st.text("abn-", min_size=1, max_size=3), _bracket), min_size=1, max_size=3).map(
    lambda parts: "n" + "".join(text + bracket for text, bracket in parts)
)
_list = st.lists(st.one_of(_name, _entry), min_size=1, max_size=4).map(",".join)


@given(_list)
def test_fold_and_expand_again_gives_the_same(text: str) -> None:
    names = expand_hosts(text)
    folded = fold_hosts(names)
    assert sorted(expand_hosts(folded)) == sorted(set(names))
    assert fold_hosts(expand_hosts(folded)) == folded


@given(st.text("n[]-,01 9.(x", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        names = expand_hosts(text)
    except HostListError:
        return
    assert sorted(expand_hosts(fold_hosts(names))) == sorted(set(names))


def _scontrol(conf: Path, what: str, hosts: str) -> list[str]:
    answer = subprocess.run(
        ["scontrol", "show", what, hosts],
        env=os.environ | {"SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert answer.stderr == ""
    return answer.stdout.split()


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scontrol reads a configuration before it does anything, and asks no controller for this."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=main Nodes=ALL\n")
    return path


@needs_scontrol
@pytest.mark.parametrize("text", READ)
def test_slurm_reads_the_same(conf: Path, text: str) -> None:
    assert _scontrol(conf, "hostnames", text) == expand_hosts(text)


@needs_scontrol
@settings(max_examples=40)
@given(_list)
def test_slurm_reads_the_same_in_the_same_order(conf: Path, text: str) -> None:
    assert _scontrol(conf, "hostnames", text) == expand_hosts(text)


@needs_scontrol
@settings(max_examples=40)
@given(st.sets(_name, min_size=1, max_size=12))
def test_slurm_reads_what_we_fold(conf: Path, names: set[str]) -> None:
    assert sorted(_scontrol(conf, "hostnames", fold_hosts(names))) == sorted(names)


@needs_scontrol
def test_slurm_reads_our_longest_ranges(conf: Path) -> None:
    names = [f"n{number}" for number in range(1, 70_000)]
    assert _scontrol(conf, "hostnames", fold_hosts(names)) == names


@needs_scontrol
@settings(max_examples=40)
@given(st.sets(_name, min_size=1, max_size=12))
def test_we_read_what_slurm_folds(conf: Path, names: set[str]) -> None:
    (folded,) = _scontrol(conf, "hostlistsorted", ",".join(names))
    assert sorted(expand_hosts(folded)) == sorted(names)
