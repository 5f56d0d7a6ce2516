"""The drill, whole: what scripts/demo shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import need_lab


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_drill() -> None:
    need_lab()
    command = [sys.executable, "-P", "-m", "transom_hpc", "drill", "--json", "--steps", "30"]
    answer = subprocess.run(
        [*command, "--name", f"test-{os.getpid()}-drill"], capture_output=True, text=True, timeout=390, check=False
    )
    assert answer.returncode == 0, answer.stderr
    facts = json.loads(answer.stdout)
    assert (facts["identical"], facts["restarts"], facts["excluded"], facts["steps"]) == (True, 1, ["n3"], 30)
    assert facts["back_s"] > 0
    assert not Path(f"/var/lib/transom-lab/test-{os.getpid()}-drill").exists()
