"""One sample of one node, and its fixed-size record for the wire.

Pure. What a node lacks is missing (None; NaN in the record and in the store) and never zero.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from typing import Any

_IDENTITY = ("host", "attempt", "number", "time_s")


@dataclass(frozen=True, slots=True)
class Reading:
    """A sample. Rates are since the sample before; shares are 0 to 1.

    Attributes:
        host: the node.
        attempt: the attempt, as "A0002-L03".
        number: counts the samples of this node from 1.
        time_s: wall clock of that node, seconds since 1970: for people, never for order.
        cpu_use: share of all cores in use.
        cpu_steal: share of all cores that the hypervisor gave to others.
        load_1m: load average over a minute.
        memory_use: share of memory not available to new programs.
        memory_available_bytes: what new programs could get.
        swap_used_bytes: on swap.
        shm_free_bytes: room in the file system of the shared-memory folder.
        disk_read_bytes_s: all disks together.
        disk_write_bytes_s: all disks together.
        net_in_bytes_s: all interfaces together, loopback left out.
        net_out_bytes_s: likewise.
        net_errors_s: packets with errors, in and out.
        net_drops_s: packets dropped, in and out.
        psi_cpu: share of the last 10 s in which some task waited for a core (pressure stall information).
        psi_memory: likewise for memory.
        psi_io: likewise for input and output.
        sidecar_cpu: cores that this sidecar itself used.
        sidecar_rss_bytes: memory that this sidecar itself holds.
        ranks: program ranks of this attempt that run here.
        ended: program ranks of this attempt whose process has ended.
        step_min: lowest finished step; missing while one rank has none.
        step_max: highest finished step.
        behind_rank: the rank at step_min.
        phase: what that rank does, a position in `heartbeat.PHASES`.
        step_s: duration of the last step, the slowest rank's.
        loss: mean of the ranks' last losses, those that are finite.
        bad_losses: ranks whose last loss is NaN or infinite.
        bad_since: of those, the first step since which no loss was finite.
        bad_count: of those, how many losses each has given since then, the fewest.
        good_step: of those, the last step whose loss was finite, or that the program began from; the lowest.
        saved_step: newest step known to be committed.
        stall_s: seconds that saving held up the program since its start, the largest of the ranks.
        beat_age_s: seconds since the oldest of the last signs of life of the ranks.
    """

    host: str
    attempt: str
    number: int
    time_s: float
    cpu_use: float | None = None
    cpu_steal: float | None = None
    load_1m: float | None = None
    memory_use: float | None = None
    memory_available_bytes: float | None = None
    swap_used_bytes: float | None = None
    shm_free_bytes: float | None = None
    disk_read_bytes_s: float | None = None
    disk_write_bytes_s: float | None = None
    net_in_bytes_s: float | None = None
    net_out_bytes_s: float | None = None
    net_errors_s: float | None = None
    net_drops_s: float | None = None
    psi_cpu: float | None = None
    psi_memory: float | None = None
    psi_io: float | None = None
    sidecar_cpu: float | None = None
    sidecar_rss_bytes: float | None = None
    ranks: float | None = None
    ended: float | None = None
    step_min: float | None = None
    step_max: float | None = None
    behind_rank: float | None = None
    phase: float | None = None
    step_s: float | None = None
    loss: float | None = None
    bad_losses: float | None = None
    bad_since: float | None = None
    bad_count: float | None = None
    good_step: float | None = None
    saved_step: float | None = None
    stall_s: float | None = None
    beat_age_s: float | None = None

    def figures(self) -> dict[str, float]:
        """The figures that are there, by name, in the order of METRICS."""
        values = ((name, getattr(self, name)) for name in METRICS)
        return {name: value for name, value in values if value is not None}


METRICS: tuple[str, ...] = tuple(field.name for field in fields(Reading) if field.name not in _IDENTITY)
"""Names of the figures, in the order of the record and of the columns in the store."""

_MAGIC = b"TrR2"
_RECORD = struct.Struct(f"<4sHxxQd64s24s{len(METRICS)}d")
RECORD_BYTES = _RECORD.size
"""Size of a record on the wire."""


def encode_reading(reading: Reading) -> bytes:
    """Pack a reading into RECORD_BYTES bytes. Names that are too long are cut at a whole character."""
    values = (getattr(reading, name) for name in METRICS)
    return _RECORD.pack(
        _MAGIC,
        len(METRICS),
        reading.number,
        reading.time_s,
        cut_text(reading.host, 64),
        cut_text(reading.attempt, 24),
        *(math.nan if value is None else value for value in values),
    )


def decode_reading(record: bytes) -> Reading | None:
    """Unpack a record; None where it is not one of this version."""
    if len(record) != RECORD_BYTES:
        return None
    magic, count, number, time_s, host, attempt, *values = _RECORD.unpack(record)
    if magic != _MAGIC or count != len(METRICS):
        return None
    figures: dict[str, Any] = {
        name: None if math.isnan(value) else value for name, value in zip(METRICS, values, strict=True)
    }
    return Reading(
        host=host.rstrip(b"\0").decode(errors="replace"),
        attempt=attempt.rstrip(b"\0").decode(errors="replace"),
        number=number,
        time_s=time_s,
        **figures,
    )


def cut_text(text: str, limit: int) -> bytes:
    """UTF-8 of a text in at most so many bytes, no character split."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore").encode()
