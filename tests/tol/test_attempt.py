from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.base.errors import TransomError
from transom_hpc.tol.attempt import Attempt

ATTEMPTS = st.builds(Attempt, st.integers(0, 9999), st.integers(0, 99))


@given(ATTEMPTS, ATTEMPTS)
def test_text_orders_as_time_does(one: Attempt, other: Attempt) -> None:
    assert (one < other) == (str(one) < str(other))
    assert Attempt.parse(str(one)) == one


@pytest.mark.parametrize("text", ["", "A1", "A0001-L1x", "A0001", "B0001-L01", "A0001-L01\n"])
def test_bad(text: str) -> None:
    with pytest.raises(TransomError, match="not an attempt"):
        Attempt.parse(text)
