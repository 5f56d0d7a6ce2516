"""How far two runs of elements are apart, for every element type that a checkpoint can hold. Reads no files.

Bits come first: two elements are equal when their bits are. Where bits differ the values are compared: two NaNs are the
same value, one NaN is as far from everything else as can be. The relative difference is |a - b| / max(|a|, |b|).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from transom_hpc.ckpt import dtypes

_AT_ONCE = 1 << 20
"""Elements whose values are held as float64 at one time."""

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two runs of elements are apart.

    Args:
        elements: how many were compared.
        differing: how many differ in their bits.
        max_abs: largest absolute difference of values; None for types that are no numbers.
        max_rel: largest relative difference of values; None for types that are no numbers.
        nans: places at which one of both is NaN and the other is not. They count as infinitely far apart.
    """

    elements: int = 0
    differing: int = 0
    max_abs: float | int | None = 0
    max_rel: float | None = 0.0
    nans: int = 0

    def __add__(self, other: Apart) -> Apart:
        numbers = self.max_abs is not None and other.max_abs is not None
        return Apart(
            self.elements + other.elements,
            self.differing + other.differing,
            max(self.max_abs or 0, other.max_abs or 0) if numbers else None,
            max(self.max_rel or 0.0, other.max_rel or 0.0) if numbers else None,
            self.nans + other.nans,
        )


def apart(a: Any, b: Any, dtype: str) -> Apart:
    """Compare two runs of elements of one type.

    Args:
        a, b: their bytes; as many of one as of the other, whole elements.
        dtype: of the elements (see dtypes).
    """
    kind = dtypes.numpy_dtype(dtype)
    one, two = (np.frombuffer(side, dtype=np.dtype((np.void, kind.itemsize))) for side in (a, b))
    total = Apart(len(one)) if _is_number(dtype) else Apart(len(one), 0, None, None)
    for begin in range(0, len(one), _AT_ONCE):
        x, y = one[begin : begin + _AT_ONCE], two[begin : begin + _AT_ONCE]
        unlike = _unlike(x, y, kind.itemsize)
        if unlike.any():
            total += _values(x[unlike], y[unlike], dtype)
    return total


def _is_number(dtype: str) -> bool:
    return dtypes.is_torch(dtype) or dtypes.numpy_dtype(dtype).kind in "biufc"


def _unlike(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Which elements differ in their bits."""
    if width in (1, 2, 4, 8):
        same = np.dtype(f"u{width}")
        return np.asarray(x.view(same) != y.view(same))
    if not width:
        return np.zeros(len(x), dtype=bool)
    return np.asarray((x.view(np.uint8) != y.view(np.uint8)).reshape(len(x), width).any(axis=1))


def _values(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], dtype: str) -> Apart:
    """Elements that differ in their bits, by value."""
    if not _is_number(dtype):
        return Apart(0, len(x), None, None)
    a, b = _decoded(x, dtype), _decoded(y, dtype)
    if a.dtype.kind in "iu":
        difference = _whole_difference(a, b)
        largest = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
        relative = difference.astype(np.float64) / np.where(largest, largest, 1)
        return Apart(0, len(x), int(difference.max()), float(relative.max()))
    nan = np.isnan(a) != np.isnan(b)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
        largest = np.maximum(np.abs(a), np.abs(b))
        relative = np.where(largest > 0, gap / np.where(largest > 0, largest, 1), 0.0)
    gap = np.where(nan | (np.isnan(gap) & ~same), np.inf, gap)
    relative = np.where(np.isnan(relative) | np.isinf(gap), np.inf, relative)
    return Apart(0, len(x), float(gap.max()), float(relative.max()), int(nan.sum()))


def _whole_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """|a - b| of whole numbers, exact: it always fits into the unsigned type of the same width."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    x, y = a.astype(a.dtype.newbyteorder("=")).view(unsigned), b.astype(b.dtype.newbyteorder("=")).view(unsigned)
    return np.asarray(np.where(a > b, x - y, y - x))


def _decoded(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Values as float64, complex128 or whole numbers."""
    if dtype == "bfloat16":
        return (x.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "complex32":
        parts = x.view("<f2").astype(np.float64).reshape(-1, 2)
        return parts[:, 0] + 1j * parts[:, 1]
    if dtype == "float4_e2m1fn_x2":
        both = x.view(np.uint8)
        return np.stack([_FP4[both & 15], _FP4[both >> 4]], axis=1).ravel()
    if dtype.startswith("float8"):
        return np.asarray(_eight_bits(dtype)[x.view(np.uint8)])
    held = x.view(dtypes.numpy_dtype(dtype))
    if held.dtype.kind == "b":
        return held.view(np.uint8)
    if held.dtype.kind in "fc":
        with np.errstate(over="ignore"):
            return held.astype(np.complex128 if held.dtype.kind == "c" else np.float64)
    return np.asarray(held)


@lru_cache
def _eight_bits(dtype: str) -> np.ndarray[Any, Any]:
    """The value of each pattern of eight bits, as torch has it."""
    import torch

    values: np.ndarray[Any, Any] = (
        torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float64).numpy()
    )
    return values


def size_of(value: Apart) -> tuple[float, float, int]:
    """How large a difference is, for sorting."""
    none = value.max_abs is None
    absolute = (math.inf if value.differing else 0.0) if none else float(value.max_abs or 0)
    return (absolute, float(value.max_rel or 0), value.differing)
