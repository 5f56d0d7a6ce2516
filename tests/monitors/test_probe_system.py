"""The figures of this node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from transom_hpc.monitors import probe_system
from transom_hpc.monitors.probe_system import SystemProbe, parse_pressure, rates
from transom_hpc.monitors.reading import METRICS


def test_this_node_has_figures(tmp_path: Path) -> None:
    probe = SystemProbe(tmp_path)
    first = probe.sample(time.monotonic())
    assert "cpu_use" not in first  # a rate needs two samples
    time.sleep(0.2)
    second = probe.sample(time.monotonic())
    assert set(second) <= set(METRICS)
    assert {"cpu_use", "memory_use", "load_1m", "sidecar_cpu", "sidecar_rss_bytes", "shm_free_bytes"} <= set(second)
    for name in ("cpu_use", "cpu_steal", "memory_use"):
        value = second.get(name, 0.0)
        assert value is not None
        assert 0.0 <= value <= 1.0


def test_what_a_node_lacks_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_system, "_PRESSURE", tmp_path / "absent")
    monkeypatch.setattr("psutil.disk_io_counters", lambda **_: None)
    monkeypatch.setattr("psutil.net_io_counters", lambda **_: {"lo": None})
    monkeypatch.delattr("psutil.cpu_times")
    probe = SystemProbe(tmp_path / "absent")
    probe.sample(1.0)
    figures = probe.sample(2.0)
    assert not [name for name in figures if name.startswith(("psi_", "disk_", "net_", "cpu_", "shm_"))]
    assert "memory_use" in figures


def test_a_counter_that_goes_back_or_is_new_gives_nothing() -> None:
    before = {"net_in_bytes": 100.0, "net_errors": 5.0, "cpu_total": 10.0, "cpu_idle": 8.0}
    after = {"net_in_bytes": 50.0, "net_errors": 7.0, "net_drops": 3.0, "cpu_total": 14.0, "cpu_idle": 11.0}
    assert rates(before, after, 2.0) == {"net_errors_s": 1.0, "cpu_use": 0.25}
    assert rates(before, after, 0.0) == {}
    assert rates({}, after, 2.0) == {}


def test_processor_time_that_stands_still_is_missing_and_not_a_division_by_zero() -> None:
    same = {"cpu_total": 10.0, "cpu_idle": 8.0}
    assert rates(same, same, 1.0) == {}


def test_pressure() -> None:
    text = "some avg10=2.11 avg60=0.96 avg300=0.49 total=8334736\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=0\n"
    assert parse_pressure("cpu", text) == {"psi_cpu": pytest.approx(0.0211)}
    assert parse_pressure("cpu", "") == {}
    assert parse_pressure("cpu", "some\nnonsense") == {}
