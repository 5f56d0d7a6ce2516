"""A rank that holds the others up is named, and every rank's stack is there to read."""

from __future__ import annotations

from .conftest import Runs


def test_the_rank_that_is_stopped_is_named(runs: Runs) -> None:
    run = runs.heat("--nodes", "2", "--tasks-per-node", "2", "--hang-after", "4", "--save-every", "20", steps=150)
    run.wait_saved(40)
    pid = runs.lab.run("n2", ["pgrep", "-f", "-o", "^[^ ]*python[^ ]* [^ ]*heat_mpi.py"]).stdout.split()[0]
    rank = runs.lab.run("n2", ["sh", "-c", f"tr '\\0' '\\n' < /proc/{pid}/environ | sed -n s/^RANK=//p"]).stdout.strip()
    runs.lab.run("n2", ["kill", "-STOP", pid])
    entry = run.wait_entry("stacks", seconds=30)
    assert entry.facts["behind"].startswith(f"rank {rank} on n2 is behind, at step ")
    assert "it is stopped (SIGSTOP)" in entry.facts["behind"]
    restart = run.wait_entry("restart")
    assert restart.facts["cause"] == "program hung"
    folder = run.path / "logs" / "A0001-L01-stacks"
    assert entry.facts["folder"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "n1-rank0.txt",
        "n1-rank1.txt",
        "n2-rank2.txt",
        "n2-rank3.txt",
    ]
    waiting = (folder / "n1-rank0.txt").read_text()
    assert "heat_mpi.py" in waiting
    assert f"rank {rank} on n2, process " in (folder / f"n2-rank{rank}.txt").read_text()
    run.wait_end()
