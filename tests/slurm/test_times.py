from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.base.errors import SpecError
from transom_hpc.slurm.times import format_time, parse_time


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("30", timedelta(minutes=30)),
        ("1:30", timedelta(minutes=1, seconds=30)),
        ("2:00:00", timedelta(hours=2)),
        ("100:00:00", timedelta(hours=100)),
        ("1-12", timedelta(days=1, hours=12)),
        ("1-2:3", timedelta(days=1, hours=2, minutes=3)),
        ("1-02:03:04", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        (" 0 ", timedelta(0)),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_the_forms_of_sbatch(text: str, limit: timedelta | None) -> None:
    assert parse_time(text) == limit


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "-5", "1-", "1-2-3", ":30", "1.5", "Partition_Limit"])
def test_errors_name_the_text(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_time(text)
    assert repr(text) in str(caught.value)
    assert caught.value.field == "time"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (timedelta(minutes=30), "00:30:00"),
        (timedelta(days=1, hours=12), "1-12:00:00"),
        (timedelta(milliseconds=1), "00:00:01"),
        (None, "UNLIMITED"),
    ],
)
def test_written(limit: timedelta | None, text: str) -> None:
    assert format_time(limit) == text


def test_no_negative_limit() -> None:
    with pytest.raises(SpecError, match="negative"):
        format_time(timedelta(seconds=-1))


@given(
    st.none()
    | st.timedeltas(timedelta(0), timedelta(days=9999)).map(lambda t: timedelta(seconds=t.total_seconds() // 1))
)
def test_written_and_read_back(limit: timedelta | None) -> None:
    assert parse_time(format_time(limit)) == limit
