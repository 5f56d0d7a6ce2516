"""Which paths the lab's user can't reach, and the mounts that let them, inside the hosts only.

A checkout below /root or below a private temporary folder can't be entered by the ordinary user whose jobs run there.
Nothing outside is changed: each host covers the closed folder with an empty one that holds just the needed paths.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.lab.account import Account, as_user
from transom_hpc.lab.processes import call


@dataclass(frozen=True, slots=True)
class Cover:
    """One closed folder and the paths below it that have to be reachable.

    Args:
        closed: the topmost folder that the user can't enter.
        needed: what must be reachable below it, none inside another; `closed` itself means all that is in it.
    """

    closed: Path
    needed: tuple[Path, ...]


def needed_paths() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """What jobs need of this installation, and what would only be convenient.

    Returns:
        The checkout, the Python in use and where it came from; and the current folder.
    """
    checkout = Path(__file__).resolve().parents[2]
    must = {checkout, Path(sys.prefix), Path(sys.prefix).resolve(), Path(sys.executable).resolve().parent}
    must |= {Path(sys.base_prefix), Path(sys.base_prefix).resolve()}
    try:
        here: tuple[Path, ...] = (Path.cwd(),)
    except OSError:
        here = ()
    return tuple(sorted(must)), here


def covers(must: Iterable[Path], wish: Iterable[Path], closed: Set[Path]) -> tuple[Cover, ...]:
    """Decide what to cover.

    Args:
        must: paths that have to be reachable, even where the closed folder is that path itself.
        wish: paths that are made reachable only where that opens nothing but themselves.
        closed: the folders that the user can't enter, among these paths and all folders above them.
    """
    found: dict[Path, set[Path]] = {}
    for path, wished in [*((path, False) for path in must), *((path, True) for path in wish)]:
        topmost = next((folder for folder in (*reversed(path.parents), path) if folder in closed), None)
        if topmost is not None and not (wished and topmost == path):
            found.setdefault(topmost, set()).add(path)
    return tuple(
        Cover(folder, tuple(sorted(path for path in paths if not paths & set(path.parents))))
        for folder, paths in sorted(found.items())
    )


def script(cover: Cover, stage: Path) -> str:
    """Shell lines that put a cover in place, to be run as root in a mount namespace of its own.

    Args:
        stage: an empty folder to hold the needed paths while they are hidden.
    """
    closed, held = shlex.quote(str(cover.closed)), shlex.quote(str(stage))
    lines = [f"mount --rbind {closed} {held}", f"mount -t tmpfs -o mode=755,size=1m cover {closed}"]
    for path in cover.needed:
        if path == cover.closed:
            # The folder itself is closed: its mode can't be changed for us alone, so show each thing in it.
            lines += [
                f"for thing in {held}/* {held}/.[!.]*; do",
                f'  target={closed}/"${{thing##*/}}"',
                '  if [ -L "$thing" ]; then cp -P "$thing" "$target"',
                '  elif [ -d "$thing" ]; then mkdir "$target"; mount --bind "$thing" "$target"',
                '  elif [ -e "$thing" ]; then : > "$target"; mount --bind "$thing" "$target"; fi',
                "done",
            ]
        else:
            target = shlex.quote(str(path))
            inside = shlex.quote(str(stage / path.relative_to(cover.closed)))
            lines += [f"mkdir -p {target}", f"mount --bind {inside} {target}"]
    return "\n".join([*lines, f"umount -l {held}"]) + "\n"


def closed_folders(account: Account, paths: Iterable[Path]) -> set[Path]:
    """Ask the kernel which of these folders, and of all folders above them, an account can't enter (root only)."""
    folders = sorted({folder for path in paths for folder in (path, *path.parents)})
    ask = 'for folder; do [ -x "$folder" ] || printf "%s\\0" "$folder"; done'
    answer = call([*as_user(account), "/bin/sh", "-c", ask, "sh", *map(str, folders)])
    return {Path(folder) for folder in answer.split("\0") if folder}
