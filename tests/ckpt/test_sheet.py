"""A file in memory behaves like one on disk."""

from __future__ import annotations

import io
import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt.sheet import PAGE, Sheet

places = st.integers(0, 5 * PAGE)
calls = st.lists(
    st.tuples(st.just("write"), places, st.binary(min_size=1, max_size=2 * PAGE))
    | st.tuples(st.just("read"), places, st.integers(0, 2 * PAGE)),
    max_size=8,
)


@given(calls)
def test_like_a_file(made: list[tuple[str, int, Any]]) -> None:
    sheet, file = Sheet(), io.BytesIO()
    for call, at, what in made:
        assert sheet.seek(at) == file.seek(at) == at
        if call == "write":
            assert sheet.write(memoryview(what)) == file.write(what)
        else:
            assert sheet.read(what) == file.read(what)
        assert sheet.tell() == file.tell()
    whole = file.getvalue()
    assert sheet.size == len(whole)
    assert sheet.seek(0, os.SEEK_END) == len(whole)
    copy = bytearray(len(whole))
    for offset, data in sheet.written():
        assert offset % PAGE == 0
        copy[offset : offset + len(data)] = data
    assert bytes(copy) == whole
    sheet.seek(0)
    assert sheet.read() == whole


def test_only_what_was_written_takes_room() -> None:
    sheet = Sheet()
    sheet.truncate(1 << 40)
    sheet.seek(1 << 39)
    sheet.write(memoryview(b"x"))
    assert [(offset, len(data)) for offset, data in sheet.written()] == [(1 << 39, PAGE)]
    assert sheet.size == 1 << 40
