"""What a Checkpointer is given: checked, or put right. Changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import h5file, kinds
from transom_hpc.ckpt.retention import Keep
from transom_hpc.ckpt.writers import ASKED

log = logging.getLogger("transom_hpc.ckpt")


def check(rank: int, world_size: int, keep: int | Keep, policy: str, align_bytes: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"rank={rank} of world_size={world_size}: ranks go from 0 to world_size - 1")
    if (keep.last if isinstance(keep, Keep) else keep) < 1:
        raise UsageError(f"keep={keep}: at least 1")
    if policy not in ("raise", "warn"):
        raise UsageError(f"on_save_error={policy!r}: 'raise' or 'warn'")
    if align_bytes < h5file.ALIGN or align_bytes & (align_bytes - 1):
        raise UsageError(f"align_bytes={align_bytes}: a power of two, at least {h5file.ALIGN}")


def check_interval(every: object, mtbf_s: float | None, agreed: bool) -> None:
    if every != "auto" and (not isinstance(every, int) or every < 1):
        raise UsageError(f"every={every!r}: a number of steps, at least 1, or 'auto'")
    if every == "auto" and not agreed:
        raise UsageError(
            "every='auto' with several ranks takes ranks that agree on each step: use transom_hpc.Checkpointer, or "
            "give a number of steps"
        )
    if mtbf_s is not None and not 0 < mtbf_s < float("inf"):
        raise UsageError(f"mtbf_s={mtbf_s}: a number of seconds, more than 0")


def check_writing(data_files: int, writer: str) -> None:
    if data_files < 1:
        raise UsageError(f"data_files={data_files}: at least 1")
    if writer not in ASKED:
        raise UsageError(f"writer={writer!r}: {', '.join(map(repr, ASKED))}")


def step_number(step: int) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(f"step={step!r}: a whole number, 0 or more")
    return step


def figures(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Figures as numbers; what is none is left out, since a figure never stops a save."""
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value.detach() if kinds.is_tensor(value) else value)
        except (TypeError, ValueError):
            log.warning("the figure %s=%r is no number and is not kept", name, value)
    return found
