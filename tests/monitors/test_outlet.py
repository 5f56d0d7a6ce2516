"""Lines to a reader that is slow, or gone."""

from __future__ import annotations

import os

from transom_hpc.monitors.outlet import Outlet


def test_a_full_pipe_never_waits_and_loses_no_part_of_a_line() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    lines = [f"{number:05d} " + "x" * 100 + "\n" for number in range(1500)]
    for line in lines:
        outlet.write(line)
    assert not outlet.flush()
    got = b""
    while not outlet.flush():
        got += os.read(reader, 1 << 16)
    os.close(writer)
    while piece := os.read(reader, 1 << 16):
        got += piece
    os.close(reader)
    assert got.decode().splitlines(keepends=True) == lines


def test_a_reader_that_never_reads_costs_bounded_memory() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    for number in range(10_000):
        outlet.write(f"{number} " + "x" * 100 + "\n")
    got = b""
    while not outlet.flush():
        got += os.read(reader, 1 << 16)
    os.close(writer)
    while piece := os.read(reader, 1 << 16):
        got += piece
    os.close(reader)
    numbers = [int(line.split()[0]) for line in got.decode().splitlines()]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 9_999
    assert len(numbers) < 3_500


def test_a_broken_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = Outlet(writer)
    outlet.write("a\n")
    assert not outlet.is_open
    outlet.write("b\n")
    assert outlet.flush()
    os.close(writer)


def test_a_closed_descriptor_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    Outlet(writer).write("a\n")
