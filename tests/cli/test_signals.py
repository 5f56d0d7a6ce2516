"""A command that is told to end tidies up first."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys, time
from transom_hpc.cli.signals import leaving_in_order
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with leaving_in_order():
    try:
        print("up", flush=True)
        time.sleep(1 if sys.argv[1] == "ignored" else 60)
    finally:
        print("tidying", flush=True)
        time.sleep(0.5)
        print("tidied", flush=True)
"""


def start(how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_tidies_up_even_when_told_twice(number: signal.Signals) -> None:
    process = start("plain")
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "tidying\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("tidied\n", 128 + number)


def test_what_is_ignored_stays_ignored() -> None:
    process = start("ignored")
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("tidying\ntidied\n", 0)
