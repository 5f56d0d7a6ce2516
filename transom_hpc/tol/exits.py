"""Why a program's step ended badly, from what its first task left: the cause and a sentence for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transom_hpc.tol.causes import Cause


@dataclass(frozen=True, slots=True)
class FirstExit:
    """The first task of the program that ended badly.

    Args:
        rank: its rank.
        host: its host.
        code: its exit status; 128 + signal when a signal ended it.
        oom: where the kernel killed a process for memory during its life: "group" (its control group), "host"
            (somewhere on the host), "" nowhere.
        kind: what the program said of its end: "memory", "storage", "error"; "" where it said nothing.
        text: the same in words, as "ValueError: shapes do not match (train.py:40)"; may be "" although there is a kind.
    """

    rank: int
    host: str
    code: int
    oom: str = ""
    kind: str = ""
    text: str = ""

    @property
    def name(self) -> str:
        """Rank and host, for people."""
        return f"rank {self.rank} on {self.host}"


def parse_exit(text: str) -> FirstExit | None:
    """Read what a task left when it ended: `RANK HOST CODE [OOM]`, and below what the program said, if anything.

    That is `KIND RANK TEXT`, with the rank that the program itself goes by (another one where torchrun started it).

    Returns:
        None where it is torn or foreign.
    """
    first, _, said = text.partition("\n")
    try:
        rank, host, code, *more = first.split()
        found = FirstExit(int(rank), host, int(code), oom=more[0] if more and more[0] in _OOM else "")
    except ValueError:
        return None
    words = parse_said(said)
    if words is None:
        return found
    kind, own, text = words
    return FirstExit(found.rank if own is None else own, found.host, found.code, found.oom, kind, text)


def parse_said(text: str) -> tuple[str, int | None, str] | None:
    """Read what a rank has said of its own end, `KIND RANK TEXT`: kind, rank (None where it is not said), text."""
    match = _SAID.match(text)
    if match is None:
        return None
    return match[1], None if match[2] == "-" else int(match[2]), " ".join(match[3].split())


def classify(first: FirstExit | None, code: int, started: bool = True, words: Sequence[str] = ()) -> tuple[Cause, str]:
    """Why the program's step ended badly.

    Args:
        first: what the first task that ended badly left; None where it left nothing.
        code: exit status of the step, which counts where `first` is None; 128 + signal when a signal ended it.
        started: whether the program has begun on its first host.
        words: Slurm's own lines about the step, in order.

    Returns:
        The cause, and one sentence of evidence.
    """
    if first is None:
        return _unsaid(code, started, words)
    how = how_ended(first.code)
    said = first.text or {"memory": "it ran out of memory", "storage": "it met a storage fault"}.get(first.kind, "")
    by_signal = _signal_of(first.code) is not None
    if first.kind == "memory":
        return Cause.OUT_OF_MEMORY, f"{first.name}: {said}"
    killed = _signal_of(first.code) == 9
    # The host's count is about all who use the host: it proves nothing of a program that did not die so.
    if first.oom == "group" or (first.oom and (killed or _OF_KILLED.search(said))):
        place = "its control group" if first.oom == "group" else "its host"
        end = "was killed" if killed else f"ended ({said or how})"
        return Cause.OUT_OF_MEMORY, f"{first.name} {end} while {place} ran out of memory"
    if killed or _OF_KILLED.search(said):
        slurm = _last(words, _OOM_WORDS)
        if slurm:
            return Cause.OUT_OF_MEMORY, f"{first.name} was killed, and Slurm says: {slurm}"
    if first.kind == "storage":
        return Cause.STORAGE, f"{first.name}: {said}"
    if first.kind:
        after = ", and it did not end by itself" if _signal_of(first.code) == _ALARM else f", then it {how}"
        return Cause.PROGRAM_ERROR, f"{first.name}: {said or how}{after if by_signal else ''}"
    if by_signal:
        return Cause.PROGRAM_KILLED, f"{first.name} {how}"
    return Cause.PROGRAM_ERROR, f"{first.name}: {how}"


def how_ended(code: int) -> str:
    """An exit status in words: "died of SIGSEGV", or "exit status 3"."""
    number = _signal_of(code)
    return f"exit status {code}" if number is None else f"died of {_SIGNALS.get(number, f'signal {number}')}"


def _unsaid(code: int, started: bool, words: Sequence[str]) -> tuple[Cause, str]:
    """No task has left a word: none was started, or all were killed together with what would have left one."""
    slurm = _last(words, _OOM_WORDS)
    if slurm:
        return Cause.OUT_OF_MEMORY, f"Slurm says: {slurm}"
    # The first is the reason: then come the tasks that srun ended because of it.
    telling = [line for line in words if not _OF_NO_WEIGHT.search(line)] or words
    why = f": {telling[0]}" if telling else " (its words are in the log)"
    if not started:
        return Cause.SLURM, f"srun did not start the program{why}"
    if code == 0:
        return Cause.SLURM, f"srun has ended, and rank 0 of the program has not ended well{why}"
    by_signal = _signal_of(code) is not None
    cause = Cause.PROGRAM_KILLED if by_signal else Cause.PROGRAM_ERROR
    return cause, f"the program's step {how_ended(code) if by_signal else f'ended with {how_ended(code)}'}{why}"


def _signal_of(code: int) -> int | None:
    return code - 128 if 128 < code <= 128 + 64 else None  # 255 is no signal, but exit(-1)


def _last(words: Sequence[str], form: re.Pattern[str]) -> str:
    return next((line for line in reversed(words) if form.search(line)), "")


_ALARM = 14  # see last_words
_OOM = frozenset({"group", "host"})
_SAID = re.compile(r"(memory|storage|error) (\d{1,9}|-) ?(.*)")
_OOM_WORDS = re.compile(r"oom.?kill|out of memory|exceeded (step|job) memory|memory limit", re.IGNORECASE)
_OF_NO_WEIGHT = re.compile(r"task[s ].*: Terminated$|retrying|couldn't chdir")
# torch's data loader, torchrun and multiprocessing of a process of theirs that SIGKILL has ended.
_OF_KILLED = re.compile(r"killed by signal: Killed|SIGKILL|exit ?code:? ?-9|terminated abruptly", re.IGNORECASE)
# Of Linux on all processors that Slurm runs on but mips, alpha and sparc.
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
