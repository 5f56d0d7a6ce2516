"""Recorded output of real Slurm, and stand-ins for Slurm's programs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# How long one example takes says how busy the machine is, and nothing of ours.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """Read a recorded file, by its path below tests/recorded."""
    return lambda name: (RECORDED / name).read_text("utf-8")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a program of Slurm's into a PATH that has no real one: its name, and what it does in sh.

    Returns the file in which it notes its arguments, one call a line.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("cat", "sleep", "env", "sh", "mv"):
        (folder / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, script: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{script}\n')
        path.chmod(0o755)
        return calls

    return write
