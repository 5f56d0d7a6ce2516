"""Numbers as a person says them."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """Seconds as a person says them: 42 s, 7 min, 3.5 h, 2.1 d."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    for unit, length in (("min", 60), ("h", 3600)):
        if seconds < length * 100:
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} d"


def size(count: int) -> str:
    """Bytes as a person says them: 512 B, 1.5 GB; powers of ten, as disks are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
