"""The choice of the writer: by what all can do, by what was asked, by what is recorded, else by measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import writers
from transom_hpc.ckpt.direct import Batch, Piece
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES
from transom_hpc.ckpt.meeting import Alone
from transom_hpc.ckpt.server import EXIT_LOST, Server
from transom_hpc.ckpt.writers import RECORD, Measured, Way, Writers, choose, cut

ABLE: dict[str, int] = {"direct": 0, "mpio": 0, "world": 1}
UNABLE = {"direct": 0}


class Together:
    """A collective writer for one process that writes with plain calls, or fails, or writes nonsense."""

    process, world = 0, 1

    def __init__(self, trouble: str = "", lost: str = "") -> None:
        self.lost = lost
        self._trouble = trouble
        self.wrote = 0

    def write(
        self,
        crew: Sequence[tuple[int, int]],  # noqa: ARG002
        folder: Path,
        names: Sequence[str],  # noqa: ARG002
        batches: Sequence[Batch],
        progress: Callable[[], None],  # noqa: ARG002
    ) -> float:
        if self._trouble:
            raise OSError(self._trouble)
        for batch in batches:
            with (folder / batch.file).open("r+b") as file:
                for piece in batch.pieces:
                    file.seek(batch.offset + piece.begin)
                    self.wrote += file.write(piece.data())
        return 1e-9


@pytest.fixture
def little_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_TELLING_BYTES", 1)


def piece(begin: int, nbytes: int) -> Piece:
    return Piece(begin, nbytes, lambda: memoryview(bytes([begin // 1000 % 255 + 1]) * nbytes))


def save(folder: Path, used: Writers) -> str:
    """Write a file of ten pieces as one rank."""
    (folder / "x").mkdir(exist_ok=True)
    (folder / "x" / "f").write_bytes(bytes(10_000))
    batches = [Batch("f", "/a", 0, tuple(piece(i * 1000, 1000) for i in range(10)))]
    way = used.decide(folder, [used.possible()])
    name = used.write(way, folder / "x", ["f"], batches, Alone(), 0, 1)
    assert (folder / "x" / "f").read_bytes() == b"".join(bytes([i + 1]) * 1000 for i in range(10))
    return name


def test_what_was_asked_beats_everything(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"choice": "mpio", "ranks": 2}))
    decide = [Writers(Files(), Together(), asked).decide for asked in ("direct", "mpio", "auto")]
    crew = ((0, 2),)
    assert decide[0](tmp_path, [ABLE, ABLE]) == Way("direct")
    assert decide[1](tmp_path, [ABLE, ABLE]) == Way("mpio", [*crew])
    assert decide[2](tmp_path, [ABLE, ABLE]) == Way("mpio", [*crew])
    assert decide[2](tmp_path, [ABLE, UNABLE]) == Way("direct")
    assert decide[2](tmp_path, [{**ABLE, "mpio": 3}, ABLE, ABLE]) == Way("measure", [(0, 2), (3, 1)])
    assert decide[2](tmp_path, [ABLE, {**ABLE, "world": 2}]) == Way("direct"), "a program and a server"
    with pytest.raises(SaveError, match="mpio was asked for and rank 1 can't use it"):
        decide[1](tmp_path, [ABLE, UNABLE])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"choice": "fast", "ranks": 1}', '{"choice": "direct", "ranks": 2}'])
def test_a_record_that_says_nothing_is_measured_again(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    assert Writers(Files(), Together()).decide(tmp_path, [ABLE]).name == "measure"


def test_without_mpi_nothing_is_measured_or_kept(tmp_path: Path) -> None:
    for used in (Writers(Files()), Writers(Files(), Together(lost="gone"))):
        assert save(tmp_path, used) == "direct"
    assert not (tmp_path / RECORD).exists()


@pytest.mark.usefixtures("little_tells")
def test_the_faster_one_writes_what_is_left_and_is_kept(tmp_path: Path) -> None:
    together = Together()
    assert save(tmp_path, Writers(Files(), together)) == "mpio"
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["choice"] == "mpio"
    assert record["bytes"] == 10_000
    assert set(record["bytes_per_s"]) == {"direct", "mpio"}
    assert together.wrote == 5000, "two pieces, then three, and nobody wrote a byte twice"


def test_trouble_in_the_measurement_costs_no_save(tmp_path: Path) -> None:
    assert save(tmp_path, Writers(Files(), Together("no such thing as MPI-IO here"))) == "direct"
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["choice"], record["why"]) == ("direct", "rank 0: no such thing as MPI-IO here")
    assert save(tmp_path, Writers(Files(), Together("again"))) == "direct"


def test_too_little_to_measure_by(tmp_path: Path) -> None:
    assert save(tmp_path, Writers(Files(), Together())) == "direct", "although mpio was a thousand times faster"
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["choice"], record["why"]) == ("direct", "")
    assert save(tmp_path, Writers(Files(), Together())) == "direct"


class Stuck(Together):
    """One whose ranks did not all come."""

    def write(self, *_: object) -> float:
        self.lost = "a collective write did not go on"
        raise SaveError(self.lost)


def test_a_writer_that_was_lost_is_not_taken_again(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"choice": "mpio", "ranks": 1}))
    with pytest.raises(SaveError, match="did not go on"):
        save(tmp_path, Writers(Files(), Stuck()))
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["choice"], record["why"]) == ("direct", "a collective write did not go on")
    assert save(tmp_path, Writers(Files(), Stuck())) == "direct"


def test_a_server_whose_collective_writer_is_lost_makes_room_for_another(tmp_path: Path) -> None:
    staging = tmp_path / "shm"
    staging.mkdir(mode=0o700)
    together = Together(lost="a collective write did not go on")
    assert Server(staging, Files(), SystemClock(), together).serve() == EXIT_LOST


@pytest.mark.usefixtures("little_tells")
def test_a_record_that_cannot_be_kept_costs_no_save(tmp_path: Path) -> None:
    (tmp_path / RECORD).mkdir()
    assert save(tmp_path, Writers(Files(), Together())) == "mpio"


@pytest.mark.usefixtures("little_tells")
def test_the_slowest_rank_counts() -> None:
    def seen(direct_s: float, mpio_s: float, trouble: str = "") -> Measured:
        return Measured({"direct": direct_s, "mpio": mpio_s}, {"direct": 100, "mpio": 100}, trouble)

    assert choose([seen(1, 2), seen(1, 2)]) == ("direct", {"direct": 200.0, "mpio": 100.0}, "")
    assert choose([seen(1, 2), seen(4, 2)])[0] == "mpio"
    assert choose([seen(9, 1), seen(9, 1, "it hangs")]) == ("direct", {"direct": 200 / 9}, "it hangs")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.lists(st.integers(1, 9), max_size=5)), max_size=8),
    st.integers(1, 20),
)
def test_parts_are_cut_at_the_same_turns_on_all_ranks(work: list[tuple[int, bool, list[int]]], most: int) -> None:
    """Ranks have other bytes in a turn, or none, but the same turns in each part."""

    def batches(rank: int) -> list[Batch]:
        found = []
        for i, (turns, short, alone) in enumerate(work):
            pieces = tuple(piece(t, 5) for t in range(turns - (short and rank == 1)))
            if turns:
                found.append(Batch("f", f"/t{i}", 0, pieces, turns))
            found.append(Batch("f", f"/a{i}", 0, tuple(piece(k, n * (rank + 1)) for k, n in enumerate(alone))))
        return found

    parts = [cut(batches(rank), 4, most * PIECE_BYTES) for rank in (0, 1)]
    for mine, others in zip(*parts, strict=True):
        assert [(b.dataset, b.turns) for b in mine if b.turns] == [(b.dataset, b.turns) for b in others if b.turns]
    for rank in (0, 1):
        for batch in batches(rank):
            again = [b for part in parts[rank] for b in part if b.dataset == batch.dataset]
            assert [p.begin for b in again for p in b.pieces] == [p.begin for p in batch.pieces]
            assert sum(b.turns for b in again) == batch.turns
            assert all(len(b.pieces) <= b.turns for b in again if batch.turns)
            assert again, "also what has no bytes, so that its file is made durable"
