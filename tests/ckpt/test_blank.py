"""A blank file copied from memory is the file that HDF5 makes."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import h5py
import pytest

from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry, Shard


def make(blanks: Blanks, folder: Path, shards: list[Shard], attributes: dict[str, int]) -> dict[str, int]:
    folder.mkdir()
    return blanks.make(folder, shards, attributes)


def shard(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> Shard:
    return Shard(f"/{name}", None, Entry(name, dtype, shape, shape, (0,) * len(shape), nbytes, ("",)))


FILE = "data-00000.h5"
SHARDS = [
    shard("structure/m", "json", (256,), 256),
    shard("tensors/m/w", "float32", (1000, 30), 120_000),
    shard("tensors/m/b", "bfloat16", (), 2),
    shard("tensors/m/ä%2F", "complex64", (3,), 24),
    shard("tensors/empty", "float32", (0, 3), 0),
    shard("tensors/raw", "raw:'<M8[s]'", (2,), 16),
    shard("objects/o", "pickle", (77,), 77),
]


def test_the_same_bytes(tmp_path: Path) -> None:
    blanks = Blanks(Files())
    first = make(blanks, tmp_path / "a", SHARDS, {"world_size": 2})
    second = make(blanks, tmp_path / "b", SHARDS, {"world_size": 2})
    other = make(blanks, tmp_path / "c", SHARDS[:3], {"world_size": 2})
    assert first == second
    assert (tmp_path / "a" / FILE).read_bytes() == (tmp_path / "b" / FILE).read_bytes()
    assert set(other) == {s.path for s in SHARDS[:3]}
    assert all(offset % 4096 == 0 for offset in first.values())
    assert "/tensors/empty" not in first


def test_large_arrays_begin_on_a_stripe_and_small_ones_leave_no_holes(tmp_path: Path) -> None:
    stripe = 1 << 16
    few = [*SHARDS, shard("tensors/v", "float32", (stripe,), 4 * stripe)]
    many = [*few, *(shard(f"tensors/{i}", "float32", (5,), 20) for i in range(200))]
    blanks = Blanks(Files(), stripe)
    offsets = make(blanks, tmp_path / "a", many, {"world_size": 2})
    assert make(blanks, tmp_path / "b", many, {"world_size": 2}) == offsets
    assert (tmp_path / "a" / FILE).read_bytes() == (tmp_path / "b" / FILE).read_bytes()
    assert [offsets[path] % stripe for path in ("/tensors/m/w", "/tensors/v")] == [0, 0]
    assert all(offset % 4096 == 0 for offset in offsets.values())
    assert (tmp_path / "a" / FILE).stat().st_size < 50 * stripe, "one stripe each would be 200"
    with h5py.File(tmp_path / "b" / FILE) as file:
        assert file["tensors/v"].id.get_offset() == offsets["/tensors/v"]
        assert file.attrs["world_size"] == 2


def test_the_first_file_shows_what_is_in_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = [replace(s, file=i % 3 if s.entry.nbytes else 0) for i, s in enumerate(SHARDS)]
    parts = [
        Shard(f"/shards/{r}/u", r, Entry("tensors/u", "bfloat16", (2,), (4,), (2 * r,), 4, ("",)), 2 * r)
        for r in (0, 1)
    ]
    blanks = Blanks(Files(), count=3)
    offsets = make(blanks, tmp_path / "a", [*spread, *parts], {})
    assert make(blanks, tmp_path / "b", [*spread, *parts], {}) == offsets
    names = [f"data-{number:05d}.h5" for number in range(3)]
    assert [p.name for p in sorted((tmp_path / "b").iterdir())] == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        with h5py.File(tmp_path / "b" / name) as file:
            for one in (s for s in [*spread, *parts] if names[s.file] == name and s.entry.nbytes):
                assert file[one.path].id.get_offset() == offsets[one.path]
    with (tmp_path / "b" / names[2]).open("r+b") as data:
        data.seek(offsets["/shards/1/u"])
        data.write(struct.pack("<2H", 7, 8))
    monkeypatch.chdir("/")
    (tmp_path / "b").rename(tmp_path / "c")
    with h5py.File(tmp_path / "c" / FILE) as file:
        assert [file[one.path].shape for one in spread if one.path.startswith("/tensors/m/")] == [(1000, 30), (), (3,)]
        assert file["tensors/u"][2:].tolist() == [7, 8]
        assert file["tensors/m/b"].attrs["torch_dtype"] == "bfloat16"
    (tmp_path / "c" / names[1]).unlink()
    with h5py.File(tmp_path / "c" / FILE) as file, pytest.raises(KeyError):
        _ = file["tensors/m/w"]


def test_another_state_is_laid_out_anew(tmp_path: Path) -> None:
    blanks = Blanks(Files(), count=2)
    make(blanks, tmp_path / "a", [replace(s, file=i % 2) for i, s in enumerate(SHARDS)], {})
    few = [shard("tensors/m/w", "float32", (5,), 20)]
    make(blanks, tmp_path / "b", few, {})
    assert [p.name for p in (tmp_path / "b").iterdir()] == [FILE]
    with h5py.File(tmp_path / "b" / FILE) as file:
        assert file["tensors/m/w"].shape == (5,)
        assert "structure" not in file


def test_other_tools_read_it(tmp_path: Path) -> None:
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not on this machine (hdf5-tools)")
    blanks = Blanks(Files())
    make(blanks, tmp_path / "a", SHARDS, {})
    make(blanks, tmp_path / "b", SHARDS, {})
    for command in (["h5dump", "-H"], ["h5ls", "-r"]):
        done = subprocess.run([*command, str(tmp_path / "b" / FILE)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert "w" in done.stdout
    with h5py.File(tmp_path / "b" / FILE) as file:
        assert file["tensors/m/b"].attrs["torch_dtype"] == "bfloat16"
        assert file["tensors/raw"].attrs["numpy_dtype"] == "'<M8[s]'"


def test_parts_show_as_one_array(tmp_path: Path) -> None:
    parts = [
        Shard(f"/shards/{r}/u", r, Entry("tensors/u", "float32", (2, 3), (4, 3), (2 * r, 0), 24, ("",))) for r in (0, 1)
    ]
    offsets = make(Blanks(Files()), tmp_path / "a", parts, {})
    with (tmp_path / "a" / FILE).open("r+b") as file:
        for rank, path in enumerate(("/shards/0/u", "/shards/1/u")):
            file.seek(offsets[path])
            file.write(struct.pack("<6f", *[rank + 1] * 6))
    with h5py.File(tmp_path / "a" / FILE) as file:
        assert file["tensors/u"].shape == (4, 3)
        assert file["tensors/u"][:, 0].tolist() == [1, 1, 2, 2]


def made(blanks: Blanks, folder: Path) -> Path:
    """A data file with something in it, and its folder."""
    offsets = make(blanks, folder, SHARDS, {})
    with (folder / FILE).open("r+b") as file:
        file.seek(offsets["/tensors/m/w"])
        file.write(b"\xff" * 120_000)
    return folder


def again(blanks: Blanks, folder: Path, deleted: Path, shards: list[Shard] = SHARDS) -> bool:
    """Whether the deleted file was taken."""
    folder.mkdir()
    blanks.make(folder, shards, {}, deleted)
    assert not (deleted / FILE).exists(), "taken or removed"
    return (folder / FILE).read_bytes().count(b"\xff") >= 120_000


def test_the_file_of_a_deleted_checkpoint_is_taken_again(tmp_path: Path) -> None:
    blanks = Blanks(Files())
    old = made(blanks, tmp_path / "old")
    (old / FILE).with_name("manifest.json").write_text("{}")
    fresh = made(blanks, tmp_path / "fresh")
    assert again(blanks, tmp_path / "a", old)
    assert (tmp_path / "a" / FILE).read_bytes() == (fresh / FILE).read_bytes(), "but for data the same as a fresh one"


def test_what_somebody_has_is_not_taken(tmp_path: Path) -> None:
    blanks = Blanks(Files())
    with (made(blanks, tmp_path / "read") / FILE).open("rb") as reader:
        assert not again(blanks, tmp_path / "a", tmp_path / "read")
        assert reader.read().count(b"\xff") >= 120_000, "as it was, to its end"
    kept = made(blanks, tmp_path / "linked") / FILE
    (tmp_path / "kept").hardlink_to(kept)
    assert not again(blanks, tmp_path / "b", tmp_path / "linked")
    assert (tmp_path / "kept").read_bytes().count(b"\xff") >= 120_000
    with h5py.File(made(blanks, tmp_path / "open") / FILE):
        assert not again(blanks, tmp_path / "c", tmp_path / "open")


def test_what_has_another_layout_is_not_taken(tmp_path: Path) -> None:
    assert again(Blanks(Files()), tmp_path / "a", made(Blanks(Files()), tmp_path / "of an earlier start"))
    blanks = Blanks(Files())
    assert not again(blanks, tmp_path / "b", made(blanks, tmp_path / "mine"), SHARDS[:3])
    old = made(blanks, tmp_path / "changed")
    with (old / FILE).open("r+b") as file:
        file.seek(old.joinpath(FILE).read_bytes().index(b"bfloat16"))
        file.write(b"BFLOAT16")
    assert not again(blanks, tmp_path / "c", old)
    old = made(blanks, tmp_path / "holes") / FILE
    whole = old.read_bytes()
    begin = whole.index(b"\xff" * 120_000)
    old.unlink()
    with old.open("wb") as file:
        file.write(whole[:begin])
        file.seek(begin + 120_000)
        file.write(whole[begin + 120_000 :])
    again(blanks, tmp_path / "d", old.parent)
    facts = (tmp_path / "d" / FILE).stat()
    assert facts.st_blocks * 512 >= facts.st_size, "room for all of it"
