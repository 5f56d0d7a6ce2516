"""Which folders are covered in the hosts, and that the covers do open what is needed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from transom_hpc.lab import account, reach
from transom_hpc.lab.reach import Cover, covers


def paths(*texts: str) -> list[Path]:
    return [Path(text) for text in texts]


def test_nothing_is_covered_where_everything_can_be_entered() -> None:
    assert covers(paths("/usr", "/srv/code"), paths("/srv"), set()) == ()


def test_the_topmost_closed_folder_is_covered_once_with_all_that_is_needed_below() -> None:
    closed = set(paths("/root", "/root/a", "/root/a/code", "/root/py"))
    found = covers(paths("/root/a/code", "/root/a/code/.venv", "/root/py", "/usr"), paths("/root/a/code/sub"), closed)
    assert found == (Cover(Path("/root"), (Path("/root/a/code"), Path("/root/py"))),)


def test_a_wish_never_opens_a_closed_folder_itself() -> None:
    closed = set(paths("/root", "/root/project"))
    assert covers([], paths("/root"), closed) == ()
    assert covers([], paths("/root/project"), closed) == (Cover(Path("/root"), (Path("/root/project"),)),)


@pytest.fixture
def private() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("itself", [False, True], ids=["below", "itself"])
def test_an_ordinary_user_reads_a_checkout_in_a_private_folder(private: Path, tmp_path: Path, itself: bool) -> None:
    checkout = private if itself else private / "deep er" / "checkout"
    (checkout / "package").mkdir(parents=True)
    (checkout / "package" / "code.py").write_text("print('read')\n")
    (checkout / ".hidden").write_text("hidden\n")
    (checkout / "link").symlink_to("package/code.py")
    (private / "secret").write_text("secret\n")
    nobody = account.lookup("nobody")
    closed = reach.closed_folders(nobody, [checkout])
    assert private in closed
    found = covers([checkout], [], closed)
    assert found == (Cover(private, (checkout,)),)

    stage = tmp_path / "stage"
    stage.mkdir()
    look = f"cd '{checkout}' && cat package/code.py .hidden link"
    inside = reach.script(found[0], stage) + " ".join(account.as_user(nobody)) + f' sh -c "{look}"'
    if not itself:
        inside += f"\n[ ! -e '{private}/secret' ]"
    done = subprocess.run(["unshare", "--mount", "bash", "-euc", inside], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "print('read')\nhidden\nprint('read')\n"), done.stderr
    assert str(private) not in Path("/proc/self/mounts").read_text()
    assert private.stat().st_mode & 0o777 == 0o700
