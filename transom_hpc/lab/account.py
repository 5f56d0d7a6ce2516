"""The ordinary user whose jobs a lab runs: found, or made for as long as a lab is up."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.base.errors import UsageError
from transom_hpc.lab.processes import SYSTEM_PATH, call

MADE = "transom"
MADE_NOTE = "made by transom lab"  # its full name tells our account from somebody's own of the same name


@dataclass(frozen=True, slots=True)
class Account:
    """One entry of the user database, with all its groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: Path
    shell: str

    def environment(self) -> dict[str, str]:
        """What a login would set."""
        return {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def as_user(account: Account) -> list[str]:
    """The start of a command line that root uses to become an account for good.

    The program is killed when whoever waits for it dies: nothing runs on unseen.
    """
    ids = [f"--reuid={account.uid}", f"--regid={account.gid}", "--groups=" + ",".join(map(str, account.groups))]
    return ["setpriv", *ids, "--inh-caps=-all", "--pdeathsig=KILL", "--"]


def lookup(name: str) -> Account:
    """Find a user.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"no user {name!r} on this machine") from None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, Path(entry.pw_dir), entry.pw_shell or "/bin/sh")


def current() -> Account:
    """The user of this process.

    Raises:
        UsageError: its number has no name; Slurm can't run jobs of such a user.
    """
    try:
        return lookup(pwd.getpwuid(os.geteuid()).pw_name)
    except KeyError:
        raise UsageError(f"user number {os.geteuid()} has no name on this machine (see /etc/passwd)") from None


def ensure(name: str | None) -> Account:
    """The user for a lab that root starts: the named one, who called sudo, or an account made for it.

    Raises:
        UsageError: no such user, or it is root, to whom Slurm forbids nothing.
        LabError: the account could not be made.
    """
    wanted = name or os.environ.get("SUDO_USER")
    if name is None and wanted in (None, "", "root"):
        wanted = MADE
        try:
            pwd.getpwnam(MADE)
        except KeyError:
            env = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"}
            options = ["--system", "--user-group", "--create-home", "--home-dir", f"/home/{MADE}"]
            call(["useradd", *options, "--shell", "/bin/bash", "--comment", MADE_NOTE, MADE], env=env)
    account = lookup(wanted or MADE)
    if account.uid == 0:
        raise UsageError("jobs of the lab run as an ordinary user; name one with --user")
    return account


def remove_made() -> None:
    """Remove the account, if it is the one that `ensure` made.

    Raises:
        LabError: it could not be removed.
    """
    try:
        entry = pwd.getpwnam(MADE)
    except KeyError:
        return
    if entry.pw_gecos.split(",")[0] == MADE_NOTE:
        call(["userdel", "--remove", MADE])
