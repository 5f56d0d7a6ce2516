"""The record of a sample."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.monitors.reading import METRICS, RECORD_BYTES, Reading, cut_text, decode_reading, encode_reading

NAMES = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=15)
FIGURES = st.fixed_dictionaries({name: st.none() | st.floats(allow_nan=False) for name in METRICS})


@given(NAMES, st.integers(0, 2**64 - 1), st.floats(0, 1e10), FIGURES)
def test_a_reading_survives_the_wire(host: str, number: int, time_s: float, figures: dict[str, Any]) -> None:
    reading = Reading(host, "A0002-L03", number, time_s, **figures)
    record = encode_reading(reading)
    assert len(record) == RECORD_BYTES
    assert decode_reading(record) == reading


def test_what_is_missing_is_never_zero() -> None:
    whole = decode_reading(encode_reading(Reading("n1", "A0001-L01", 1, 0.0, cpu_use=0.0, load_1m=math.nan)))
    assert whole is not None
    assert whole.cpu_use == 0.0
    assert whole.load_1m is None
    assert whole.memory_use is None
    assert whole.figures() == {"cpu_use": 0.0}


@given(st.binary(max_size=RECORD_BYTES + 8))
def test_foreign_bytes_are_no_reading(record: bytes) -> None:
    assert decode_reading(record) is None


def test_a_record_of_another_version_is_no_reading() -> None:
    record = encode_reading(Reading("n1", "A0001-L01", 1, 0.0))
    assert decode_reading(b"TrR1" + record[4:]) is None
    assert decode_reading(record + b"\0" * 8) is None


def test_a_record_fits_an_eager_message() -> None:
    assert RECORD_BYTES <= 1024


@given(st.text(max_size=100), st.integers(0, 80))
def test_a_long_name_is_cut_between_characters(text: str, limit: int) -> None:
    cut = cut_text(text, limit)
    assert len(cut) <= limit
    cut.decode()
