"""Differences between elements, by hand and against plain Python."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from transom_hpc.ckpt import dtypes
from transom_hpc.ckpt.numbers import Apart, apart, size_of

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz")


def of(a: object, b: object, dtype: str) -> Apart:
    kind = getattr(torch, dtype)
    x, y = (np.asarray(side).copy() for side in (a, b))
    x, y = (torch.from_numpy(side).to(kind).view(torch.uint8).numpy() for side in (x, y))
    return apart(x, y, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(dtype: str) -> None:
    assert of([1.0, 2.0, -4.0], [1.0, 2.5, -4.0], dtype) == Apart(3, 1, 0.5, 0.2, 0)
    assert of([1.0], [1.0], dtype) == Apart(1, 0, 0, 0.0, 0)
    found = of([1.0, math.nan, math.nan], [1.0, math.nan, 3.0], dtype)
    assert (found.differing, found.max_abs, found.max_rel, found.nans) == (1, math.inf, math.inf, 1)


def test_special_values() -> None:
    assert of([math.inf, -math.inf], [math.inf, -math.inf], "float32").differing == 0
    found = of([math.inf], [-math.inf], "float32")
    assert (found.max_abs, found.max_rel, found.nans) == (math.inf, math.inf, 0)
    found = of([0.0], [-0.0], "float32")
    assert (found.differing, found.max_abs, found.max_rel) == (1, 0, 0), "other bits, the same value"
    quiet, other = np.array([0x7FC00000], np.uint32), np.array([0x7FC00001], np.uint32)
    found = apart(quiet.view(np.uint8), other.view(np.uint8), "float32")
    assert (found.differing, found.max_abs, found.nans) == (1, 0, 0), "two NaNs are the same value"
    assert of([1.7e308], [-1.7e308], "float64").max_abs == math.inf
    assert of([0.0], [5e-324], "float64") == Apart(1, 1, 5e-324, 1.0, 0)


def test_whole_numbers_are_exact() -> None:
    low, high = -(2**63), 2**63 - 1
    found = of([low, 5], [high, 5], "int64")
    assert found.max_abs == 2**64 - 1
    assert found.differing == 1
    assert of([2**62], [2**62 + 1], "int64").max_abs == 1, "float64 can't tell these apart"
    assert of([-128], [127], "int8") == Apart(1, 1, 255, 255 / 128, 0)
    assert of([True, False], [True, True], "bool") == Apart(2, 1, 1, 1.0, 0)


def test_complex() -> None:
    assert of([3 + 4j], [0j], "complex64") == Apart(1, 1, 5.0, 1.0, 0)
    assert of([3 + 4j], [0j], "complex128").max_abs == 5.0
    x = np.array([3, 4], np.float16).view(np.uint8)
    assert apart(x, np.zeros(4, np.uint8), "complex32").max_abs == 5.0


def test_four_bits() -> None:
    assert apart(np.array([0x21], np.uint8), np.array([0x25], np.uint8), "float4_e2m1fn_x2") == Apart(
        1, 1, 2.5, 2.5 / 3
    )


def test_numpy_types() -> None:
    x, y = np.array([1.5, 2.5], ">f8"), np.array([1.5, 2.0], ">f8")
    assert apart(x.view(np.uint8), y.view(np.uint8), "numpy:>f8") == Apart(2, 1, 0.5, 0.2)
    record = np.dtype([("a", "<i4"), ("b", "S3")])
    a, b = np.zeros(3, record), np.zeros(3, record)
    b["b"][1] = b"x"
    name = dtypes.of_numpy(record)
    assert name is not None
    assert apart(a.view(np.uint8), b.view(np.uint8), name) == Apart(3, 1, None, None)


@pytest.mark.parametrize("dtype", sorted(dtypes._TORCH))
def test_every_type_is_known(dtype: str) -> None:
    width = dtypes.numpy_dtype(dtype).itemsize
    a, b = np.zeros(width * 4, np.uint8), np.zeros(width * 4, np.uint8)
    b[width] = 1
    found = apart(a, b, dtype)
    assert (found.elements, found.differing) == (4, 1)
    assert found.max_abs is not None


@given(some.lists(some.tuples(*[some.integers(-(2**31), 2**31 - 1)] * 2), min_size=1, max_size=50))
def test_as_plain_python(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
    found = apart(a.view(np.uint8), b.view(np.uint8), "int32")
    assert found.max_abs == max(abs(x - y) for x, y in pairs)
    exact = max(Fraction(abs(x - y), max(abs(x), abs(y)) or 1) for x, y in pairs)
    assert found.max_rel == pytest.approx(float(exact))
    assert found.differing == sum(x != y for x, y in pairs)


def test_sums_and_order() -> None:
    assert Apart(2, 1, 3, 0.5, 1) + Apart(5, 0, 1, 0.7) == Apart(7, 1, 3, 0.7, 1)
    assert Apart(1, 1, None, None) + Apart(3) == Apart(4, 1, None, None)
    rows = [Apart(1, 1, 2.0, 0.1), Apart(1, 1, None, None), Apart(1, 1, 3.0, 0.1), Apart(1, 1, 2.0, 0.2)]
    assert sorted(rows, key=size_of) == [rows[0], rows[3], rows[2], rows[1]]
