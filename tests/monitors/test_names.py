"""The public names of the monitors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from transom_hpc import monitors


def test_every_public_name_is_there() -> None:
    assert sorted(monitors.__all__) == monitors.__all__
    for name in monitors.__all__:
        assert getattr(monitors, name).__module__.startswith("transom_hpc.monitors.") or name == "Message"
    assert set(monitors.__all__) <= set(dir(monitors))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = monitors.nonsense


def test_names_load_nothing_but_what_they_need() -> None:
    code = (
        "import sys; from transom_hpc.monitors import HeartbeatWriter, parse_line\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py', 'h5py', 'psutil', 'pandas') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "[]"


def test_a_sidecar_needs_no_numpy_before_it_stores() -> None:
    code = (
        "import sys; from transom_hpc.monitors import Sidecar\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py', 'h5py', 'pandas') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "[]"
