"""The command line of the lab, where no lab is needed."""

from __future__ import annotations

import subprocess
import sys


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom transom_hpc.cli import transom\n"
        "transom.main(['lab', '--help'], standalone_mode=False)\n"
        "print('heavy:', sorted({'torch', 'h5py', 'mpi4py', 'pandas', 'rich', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n")
    for verb in ("up", "down", "status", "crash", "freeze", "thaw", "cut", "mend", "boot", "exec", "env"):
        assert f"\n  {verb} " in done.stdout


def test_a_lab_that_is_not_up_is_one_line_and_exit_code_2() -> None:
    for verb in (["status"], ["env"], ["crash", "n1"], ["exec", "n1", "true"]):
        line = [sys.executable, "-m", "transom_hpc", "lab", verb[0], "--name", "no-such-lab", *verb[1:]]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "transom: no lab 'no-such-lab' is up; `transom lab up` starts one\n"
