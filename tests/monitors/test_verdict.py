"""The lines of the sidecar."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.monitors.verdict import (
    MARKER,
    Alone,
    Behind,
    Bye,
    Cleared,
    Message,
    Progress,
    Ready,
    Replaced,
    Verdict,
    format_line,
    parse_line,
)

MESSAGES: list[Message] = [
    Ready(("n1", "n2"), ("n3",)),
    Progress(0),
    Progress(8, 1, 11, 12, 0.5, 0.25, 3.5, 0, 10, 1.5, "training", Behind("n2", 5), 4),
    Verdict("n3", "silent", "act", "n3 has not been heard for 3.1 s", {"cpu_use": 0.5, "load_1m": None}),
    Cleared("n3", "silent", "n3 is heard again"),
    Alone(2, 3.5),
    Replaced("n2"),
    Bye("asked to stop (SIGTERM)"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_line(message: Message) -> None:
    line = format_line(message)
    assert line.startswith(MARKER)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert parse_line(line) == message
    assert parse_line("0: " + line.rstrip("\n") + "\r") == message


def test_a_line_as_it_is_written() -> None:
    line = format_line(Verdict("n3", "silent", "act", "é", {"cpu_use": 1 / 3}))
    assert line == (
        '@transom {"kind":"verdict","host":"n3","cause":"silent","severity":"act","evidence":"é",'
        '"readings":{"cpu_use":0.333333}}\n'
    )


def test_what_is_not_a_number_is_null() -> None:
    message = parse_line(format_line(Progress(1, loss=math.nan, step_s=math.inf)))
    assert message == Progress(1)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "WARNING: Open MPI failed to TCP connect to a peer MPI process.",
        "@transom",
        "@transom {",
        "@transom []",
        '@transom {"kind":"unheard of"}',
        '@transom {"host":"n1"}',
        '@transom {"kind":"verdict","host":"n1"}',
        '@transom {"kind":"verdict","host":1,"cause":"silent","severity":"act","evidence":""}',
        '@transom {"kind":"verdict","host":"n1","cause":"silent","severity":"maybe","evidence":""}',
        '@transom {"kind":"bye","reason":"x"} and more',
        '{"kind":"bye","reason":"x"}',
    ],
)
def test_a_foreign_line_is_passed_over(line: str) -> None:
    assert parse_line(line) is None


def test_members_of_a_later_version_are_passed_over() -> None:
    assert parse_line('@transom {"kind":"bye","reason":"x","later":[1]}') == Bye("x")


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    parse_line(text)
    parse_line(MARKER + text)


@given(st.text(), st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=3))
def test_any_evidence_survives(text: str, readings: dict[str, float]) -> None:
    text = text.encode(errors="replace").decode()
    readings = {key.encode(errors="replace").decode(): value for key, value in readings.items()}
    message = parse_line(format_line(Verdict("n", "silent", "watch", text, dict(readings))))
    assert isinstance(message, Verdict)
    assert message.evidence == text
    assert set(message.readings) == set(readings)
