"""Any text is a name, and comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt.names import escape, join, shown, unescape


@given(st.text(st.characters()))
def test_escape_is_undone(key: str) -> None:
    part = escape(key)
    assert unescape(part) == key
    assert part not in ("", ".")
    assert "/" not in part
    assert "\0" not in part
    part.encode("utf-8")


@given(st.text(st.characters()), st.text(st.characters()))
def test_different_keys_have_different_names(a: str, b: str) -> None:
    assert (escape(a) == escape(b)) == (a == b)


def test_examples() -> None:
    assert join(("model", "layers.0.weight")) == "model/layers.0.weight"
    assert join(("a/b", "", ".")) == "a%2Fb/%/%2E"
    assert shown("tensors/a%2Fb/%/w") == "a/b/''/w"
    assert shown("tensors/%") == "''"
