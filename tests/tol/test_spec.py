from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.errors import RunDirError, UsageError
from transom_hpc.tol.spec import JobSpec, Submitted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "nodes must be a whole number of at least 1, not 0"),
        ({"nodes": "4"}, "nodes must be a whole number"),
        ({"nodes": True}, "nodes must be a whole number"),
        ({"spares": -1}, "spares must be a whole number of at least 0"),
        ({"nodes": 0, "spares": 2}, "nodes must be"),
        ({"tasks_per_node": 0}, "tasks_per_node must be"),
        ({"save_every": 0}, "save_every must be"),
        ({"keep": 0}, "keep must be"),
        ({"time": "two hours"}, "two hours"),
        ({"time": 120}, "time must be a text, not 120"),
        ({"exclude": "n[1-"}, r"n\[1-"),
        ({"name": "a b"}, "name 'a b'"),
        ({"name": "-x"}, "begin with a letter or digit"),
        ({"run_dir": ""}, "run_dir is empty"),
        ({"site": None}, "site must be a text"),
        ({"hang_after_s": 0}, "hang_after_s must be a number of seconds, more than 0"),
        ({"start_deadline_s": float("inf")}, "start_deadline_s must be a number of seconds, more than 0, not inf"),
        ({"start_deadline_s": float("nan")}, "start_deadline_s must be a number of seconds"),
        ({"local": True, "nodes": 2}, "local runs have one node"),
    ],
)
def test_bad(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        JobSpec(**values)
    assert caught.value.exit_code == 2


def test_round_trip() -> None:
    submitted = Submitted(JobSpec(nodes=4, spares=1, time="2:00:00"), ("python", "train.py"), "/home/me", job_id="7")
    assert Submitted.from_json(submitted.to_json(), Path("spec.json")) == submitted


@pytest.mark.parametrize("data", [b"", b"{}", b'{"spec": {"nodes": "x"}, "program": [], "cwd": ""}'])
def test_not_ours(data: bytes) -> None:
    with pytest.raises(RunDirError, match=r"spec\.json can't be read"):
        Submitted.from_json(data, Path("spec.json"))


def test_the_interval() -> None:
    submitted = Submitted(JobSpec(save_every="auto"), ("x",), "/")
    assert Submitted.from_json(submitted.to_json(), Path("spec.json")) == submitted
    with pytest.raises(UsageError, match="at least 1, or auto, not 'often'"):
        JobSpec(save_every="often")  # type: ignore[arg-type]
    with pytest.raises(RunDirError, match="can't be read"):
        Submitted.from_json(submitted.to_json().replace(b'"auto"', b'"often"'), Path("spec.json"))
