"""The figures of this node: processor, memory, disks, network, pressure. Owns psutil's system side.

Reads only what the kernel answers from memory: nothing here touches a network file system. What is absent is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_PRESSURE = Path("/proc/pressure")


class SystemProbe:
    """Samples this node; rates are over the time since the sample before, so the first one has none.

    Args:
        shm: a folder in the file system whose free room is told.
    """

    def __init__(self, shm: Path) -> None:
        self._shm = shm
        self._counters: dict[str, float] = {}
        self._time_s = 0.0

    def sample(self, now: float) -> dict[str, float | None]:
        """Take a sample.

        Args:
            now: a monotonic clock, in seconds.

        Returns:
            figures by name, see `reading.METRICS`; what this node lacks is left out.
        """
        counters: dict[str, float] = {}
        figures: dict[str, float | None] = {}
        for probe in (_cpu_counters, _disk_counters, _network_counters, _own_counters):
            counters |= _answer(probe)
        for gauge in (_memory, _swap, _load, _pressure, _own_memory, lambda: _free(self._shm)):
            figures |= _answer(gauge)
        figures |= rates(self._counters, counters, now - self._time_s)
        self._counters, self._time_s = counters, now
        return figures


def rates(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float | None]:
    """Turn two readings of counters into rates and shares. Pure.

    A counter that was not there before, or that went backwards (replaced device, wrapped around), gives nothing.

    Args:
        before: counters by name; those named "cpu_..." are seconds of all cores together.
        after: the same, later.
        seconds: between the two.
    """
    if seconds <= 0:
        return {}
    change = {name: after[name] - before[name] for name in after if name in before and after[name] >= before[name]}
    figures: dict[str, float | None] = {}
    for name in ("disk_read_bytes", "disk_write_bytes", "net_in_bytes", "net_out_bytes", "net_errors", "net_drops"):
        if name in change:
            figures[f"{name}_s"] = change[name] / seconds
    total = change.get("cpu_total", 0.0)
    if total > 0:
        if "cpu_idle" in change:
            figures["cpu_use"] = min(1.0, max(0.0, 1.0 - change["cpu_idle"] / total))
        if "cpu_stolen" in change:
            figures["cpu_steal"] = min(1.0, change["cpu_stolen"] / total)
    if "sidecar_seconds" in change:
        figures["sidecar_cpu"] = change["sidecar_seconds"] / seconds
    return figures


def _answer(probe: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        return probe()
    except Exception:  # kernels, containers and psutil versions lack different things, and none is a reason to end
        return {}


def _cpu_counters() -> dict[str, float]:
    times = psutil.cpu_times()
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user time as well
    counters = {"cpu_total": sum(times) - guests, "cpu_idle": times.idle + getattr(times, "iowait", 0.0)}
    if hasattr(times, "steal"):
        counters["cpu_stolen"] = times.steal
    return counters


def _disk_counters() -> dict[str, float]:
    disks = psutil.disk_io_counters(nowrap=False)
    return {} if disks is None else {"disk_read_bytes": disks.read_bytes, "disk_write_bytes": disks.write_bytes}


def _network_counters() -> dict[str, float]:
    cards = psutil.net_io_counters(pernic=True, nowrap=False)
    real = [card for name, card in cards.items() if name != "lo"]
    if not real:
        return {}
    return {
        "net_in_bytes": sum(card.bytes_recv for card in real),
        "net_out_bytes": sum(card.bytes_sent for card in real),
        "net_errors": sum(card.errin + card.errout for card in real),
        "net_drops": sum(card.dropin + card.dropout for card in real),
    }


def _own_counters() -> dict[str, float]:
    return {"sidecar_seconds": time.process_time()}


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    figures = {"memory_available_bytes": float(memory.available)}
    if memory.total > 0:
        figures["memory_use"] = 1.0 - memory.available / memory.total
    return figures


def _swap() -> dict[str, float]:
    return {"swap_used_bytes": float(psutil.swap_memory().used)}


def _load() -> dict[str, float]:
    return {"load_1m": os.getloadavg()[0]}


def _own_memory() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"sidecar_rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}


def _free(folder: Path) -> dict[str, float]:
    room = os.statvfs(folder)
    return {"shm_free_bytes": float(room.f_bavail * room.f_frsize)}


def _pressure() -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in ("cpu", "memory", "io"):
        try:
            text = (_PRESSURE / name).read_text()
        except OSError:  # older kernels, or switched off
            continue
        figures |= parse_pressure(name, text)
    return figures


def parse_pressure(name: str, text: str) -> dict[str, float]:
    """Read a file of /proc/pressure: the share of the last ten seconds in which some task waited."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["some"]:
            for word in words[1:]:
                key, _, value = word.partition("=")
                if key == "avg10":
                    return {f"psi_{name}": float(value) / 100}
    return {}
