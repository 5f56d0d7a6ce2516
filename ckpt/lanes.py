"""A few threads that work off a list of jobs, for reads and writes that are in flight together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

LANES = 4
"""Transfers in flight: more gained nothing on local disks, fewer lost a third."""


def run(jobs: Iterable[Callable[[], None]], lanes: int = LANES) -> None:
    """Do all jobs, several at a time; the caller's thread is one of the lanes.

    Raises:
        BaseException: the first that a job raised; jobs not yet begun are left out then.
    """
    waiting = deque(jobs)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:  # handed to the caller's thread below
                errors.append(error)

    helpers = [
        threading.Thread(target=work, name="transom-lane", daemon=True) for _ in range(min(lanes, len(waiting)) - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
