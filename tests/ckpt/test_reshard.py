"""What was saved on some ranks, cut in some way, is restored on any others, cut in any other way; and no more is read
than that takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from transom_hpc.ckpt import list_checkpoints, verify
from transom_hpc.cli import transom

sys.path.insert(0, str(Path(__file__).parent))
from cuts import ARRAYS, whole

pytestmark = pytest.mark.timeout(120)


def test_from_four_ranks_to_two_to_three_to_eight_to_one(ranks: Any, directory: Path) -> None:
    chain = [(4, "rows"), (2, "rows"), (3, "rows"), (8, "rows"), (1, "rows"), (4, "rows")]
    for number, (count, how) in enumerate(chain):
        done = ranks("cut", count, f"A{number}", directory=directory, how=how, save=number + 1)
        assert done.codes == [0] * count, done.errors
        assert [said["step"] for said in done.said] == [number] * count
        if number:
            assert all(said["wrong"] == [] and said["source"].startswith("step-") for said in done.said), done.said
            needed, read = (sum(said[key] for said in done.said) for key in ("needed_bytes", "read_bytes"))
            assert read <= 1.1 * needed
    found = list_checkpoints(directory)[-1]
    assert verify(found.path) == []


@pytest.mark.parametrize("how", ["columns", "grid", "whole"])
def test_cut_along_other_axes(ranks: Any, directory: Path, how: str) -> None:
    """And back; with ghost cells, so that the live arrays don't lie together. All ranks are on one host, so that the
    host reads what it needs about once, whichever of its ranks wants which elements of a block."""
    assert ranks("cut", 4, "A1", directory=directory, how="rows", save=1).codes == [0] * 4
    for number, (count, cut) in enumerate([(3, how), (4, "rows")], start=2):
        done = ranks("cut", count, f"A{number}", directory=directory, how=cut, save=number, ghosts=True)
        assert done.codes == [0] * count, done.errors
        assert all(said["wrong"] == [] and said["step"] == number - 1 for said in done.said), done.said
        stored = list_checkpoints(directory)[-2].manifest.nbytes
        read = sum(said["read_bytes"] for said in done.said)
        assert read <= 1.1 * stored
        assert all(said["read_bytes"] <= 1.5 * stored / count for said in done.said), "the work is spread"


def test_any_tool_sees_whole_arrays(ranks: Any, directory: Path) -> None:
    assert ranks("cut", 6, "A1", directory=directory, how="grid", save=3).codes == [0] * 6
    (found,) = list_checkpoints(directory)
    with h5py.File(found.path / "data-00000.h5") as file:
        for name, (shape, dtype) in ARRAYS.items():
            if name in ("odd", "dates"):  # elements that HDF5 does not know
                continue
            data = file[f"tensors/{name}"]
            assert data.shape == shape
            assert np.array_equal(data[...], whole(name, 3).astype(dtype))
        assert "ranks" not in file
    balance = found.manifest.balance
    assert balance.most - balance.least < 4 << 20
    assert balance.mean * 6 == found.manifest.nbytes


def test_memory_of_more_ranks_than_there_are_now(ranks: Any, directory: Path, staging: Path) -> None:
    """The segments of all of them are on this host, so nothing is read from a file."""
    died = ranks("cut", 4, "A1", directory=directory, how="rows", save=1, dies=True)
    assert died.codes == [-9] * 4, died.errors
    for number, (count, how) in enumerate([(2, "columns"), (3, "grid"), (3, "rows")], start=2):
        done = ranks("cut", count, f"A{number}", directory=directory, how=how, save=number, dies=True)
        assert done.codes == [-9] * count, done.errors
        assert all(f"restored step {number - 1} from memory:A{number - 1}" in error for error in done.errors)
        segments = [path.name for path in staging.iterdir() if not path.name.startswith(".")]
        assert len(segments) <= 2 * count, "what ranks left that are gone is gone"
    again = ranks("cut", 1, "A5", directory=directory, how="rows")
    assert again.said[0]["wrong"] == []
    assert again.said[0]["source"] == "memory:A4"
    assert not [path for path in staging.iterdir() if "needs" in path.name or "board" in path.name]


def test_nobody_changes_memory_from_which_others_still_copy(ranks: Any, directory: Path) -> None:
    """Rank 2 is done at once, saves more steps, and would do that where rank 1 still reads."""
    assert ranks("cut", 4, "A1", directory=directory, how="rows", save=1, times=2, dies=True).codes == [-9] * 4
    done = ranks("cut", 3, "A2", directory=directory, how="rows", save=3, times=3, slow=1)
    assert done.codes == [0] * 3, done.errors
    assert all(said["wrong"] == [] and said["source"] == "memory:A1" for said in done.said), done.said


def test_memory_of_some_ranks_is_not_enough_for_others(ranks: Any, directory: Path, staging: Path) -> None:
    assert ranks("cut", 3, "A1", directory=directory, how="rows", save=1, dies=True).codes == [-9] * 3
    for path in staging.iterdir():
        if "-rank-00001." in path.name and not path.name.startswith("."):
            path.unlink()
    done = ranks("cut", 2, "A2", directory=directory, how="rows")
    assert done.codes == [0, 0], done.errors
    assert all(said["wrong"] == [] and said["source"] == "step-000000001" for said in done.said)


def test_memory_without_what_a_rank_had_of_its_own(ranks: Any, directory: Path, staging: Path) -> None:
    """What is left here has all arrays, but whoever is gone had something that would be lost: the file knows."""
    facts = {"directory": directory, "copies": 3, "rng": True}
    assert ranks("stages", 3, "A1", **facts, save=1, dies=True).codes == [-9] * 3
    for path in staging.iterdir():
        if "-rank-00002." in path.name and not path.name.startswith("."):
            path.unlink()
    done = ranks("stages", 2, "A2", directory=directory, copies=2, rng=True)
    assert all("rng of rank 2 has no rank to go to" in said["error"] for said in done.said), done
    left = [path for path in staging.iterdir() if not path.name.startswith(".")]
    assert len(left) == 2, "nothing was touched"
    for path in left:
        path.unlink()


def test_memory_of_hosts_of_their_own(ranks: Any, directory: Path, tmp_path: Path) -> None:
    """A host's own memory has not what it wants of a state that is cut otherwise now: the file has it. Each host then
    reads what it needs by itself."""
    facts = {"directory": directory, "hosts": tmp_path / "host"}
    assert ranks("cut", 2, "A1", **facts, how="rows", save=1, dies=True).codes == [-9] * 2
    done = ranks("cut", 2, "A2", **facts, how="rows", save=2, dies=True)
    assert all("restored step 1 from memory:A1" in error for error in done.errors), done.errors
    done = ranks("cut", 2, "A3", **facts, how="columns", save=3, dies=True)
    assert all("restored step 2 from step-000000002" in error for error in done.errors), done.errors
    done = ranks("cut", 3, "A4", **facts, how="rows")
    assert all(said["wrong"] == [] and said["source"] == "step-000000003" for said in done.said), done
    assert all(said["read_bytes"] <= 1.15 * said["needed_bytes"] for said in done.said), done.said


def test_memory_as_many_ranks_but_cut_otherwise(ranks: Any, directory: Path) -> None:
    assert ranks("cut", 2, "A1", directory=directory, how="rows", save=1, dies=True).codes == [-9] * 2
    done = ranks("cut", 2, "A2", directory=directory, how="columns", save=2, dies=True)
    assert all("restored step 1 from memory:A1" in error for error in done.errors), done.errors
    done = ranks("cut", 2, "A3", directory=directory, how="rows")
    assert all(said["wrong"] == [] and said["source"] == "memory:A2" for said in done.said)


def test_show_tells_how_even_the_work_was(ranks: Any, directory: Path) -> None:
    assert ranks("cut", 4, "A1", directory=directory, how="grid", save=3).codes == [0] * 4
    shown = CliRunner().invoke(transom, ["ckpt", "show", str(directory)], env={"COLUMNS": "200"}).output
    assert re.search(r"each rank wrote [\d.]+ MB to [\d.]+ MB, [\d.]+ MB on average", shown), shown
    assert re.search(r"wide +float32 +504x600 of 1009x1201 ", shown.replace("numpy:<f4", "float32")), shown


def test_stages_of_a_pipeline_cut_otherwise(ranks: Any, directory: Path) -> None:
    for number, (count, copies) in enumerate([(3, 1), (4, 2), (7, 1), (1, 1), (4, 1)]):
        done = ranks("stages", count, f"A{number}", directory=directory, save=number + 1, copies=copies)
        assert done.codes == [0] * count, done.errors
        assert all(said == {"step": number, "wrong": []} for said in done.said), done.said
        stored = list_checkpoints(directory)[-1].manifest.stored
        assert sum(".".join(i.entry.name.split("/")[1:]).startswith("model.layer") for i in stored) == 7, "each once"


def test_stages_of_a_pipeline_that_lost_a_layer(ranks: Any, directory: Path) -> None:
    """What no rank has a place for is named; what one rank has a place for is not."""
    assert ranks("stages", 2, "A1", directory=directory, save=1).codes == [0, 0]
    done = ranks("stages", 3, "A2", directory=directory, layers=6)
    assert done.codes == [0] * 3, done.errors
    for said in done.said:
        assert "only in the checkpoint: model/layer6;" in said["error"], said
    done = ranks("stages", 3, "A3", directory=directory, layers=8)
    for said in done.said:
        assert "not in the checkpoint: model/layer7;" in said["error"], said
        assert "only in" not in said["error"], said


def test_states_of_random_numbers_are_no_part_of_a_pipeline(ranks: Any, directory: Path) -> None:
    assert ranks("stages", 4, "A1", directory=directory, save=1, copies=2, rng=True).codes == [0] * 4
    for count, why in (
        (2, "rng of rank 2 has no rank to go to"),
        (5, "rng is kept for each rank, and there is none for"),
    ):
        done = ranks("stages", count, f"A{count}", directory=directory, rng=True)
        assert all(why in said["error"] for said in done.said), done.said


def test_replicas_that_have_gone_apart(ranks: Any, directory: Path) -> None:
    places = [(0, 4), (4, 4), (0, 4), (4, 4)]
    assert ranks("drift", 4, "A1", directory=directory, places=places, size=8, save=1, apart=3).codes == [0] * 4
    again = ranks("drift", 4, "A2", directory=directory, places=places, size=8)
    assert [said["found"] for said in again.said] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [1004, 1005, 1006, 1007]
    ]  # fmt: skip
    assert not any("overlap" in error for error in again.errors)
    two = ranks("drift", 2, "A3", directory=directory, places=[(0, 3), (3, 5)], size=8)
    assert [said["found"] for said in two.said] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert "or that ranks held differently; the lowest rank's is taken" in two.errors[1]
    assert "u (ranks 1 and 3)" in two.errors[1]


def test_parts_that_overlap(ranks: Any, directory: Path) -> None:
    """Such as with ghost cells: a rank's own come first, then the lowest rank's."""
    places = [(0, 6), (4, 6)]
    assert ranks("drift", 2, "A1", directory=directory, places=places, size=10, save=1, apart=1).codes == [0, 0]
    again = ranks("drift", 2, "A2", directory=directory, places=places, size=10)
    assert again.said[1]["found"] == [1004, 1005, 1006, 1007, 1008, 1009]
    one = ranks("drift", 1, "A3", directory=directory, places=[(0, 10)], size=10)
    assert one.said[0]["found"] == [0, 1, 2, 3, 4, 5, 1006, 1007, 1008, 1009]
    assert "u (ranks 0 and 1)" in one.errors[0]
    (found,) = list_checkpoints(directory)
    with h5py.File(found.path / "data-00000.h5") as file:
        assert file["tensors/u"][...].tolist() == one.said[0]["found"], "other tools see the same"


def test_elements_that_nobody_saved(ranks: Any, directory: Path) -> None:
    assert ranks("drift", 2, "A1", directory=directory, places=[(0, 3), (5, 3)], size=8, save=1).codes == [0, 0]
    again = ranks("drift", 2, "A2", directory=directory, places=[(0, 3), (5, 3)], size=8)
    assert [said["found"] for said in again.said] == [[0, 1, 2], [5, 6, 7]]
    refused = ranks("drift", 2, "A3", directory=directory, places=[(0, 4), (4, 4)], size=8)
    for said in refused.said:
        assert "u (no rank saved [3:4])" in said["error"]
        assert "u (no rank saved [4:5])" in said["error"]
    taken = ranks("drift", 2, "A4", directory=directory, places=[(0, 4), (5, 3)], size=8, strict=False)
    assert [said["found"] for said in taken.said] == [[0, 0, 0, 0], [5, 6, 7]]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_array_of_more_than_two_gigabytes(ranks: Any, directory: Path) -> None:
    """In one part, in parts of another axis, from files and from memory; each element is looked at."""
    facts = {"directory": directory, "shape": (24_000, 24_500), "keep": 1}
    assert ranks("huge", 1, "A1", **facts, how="rows", save=1).codes == [0]
    (item,) = [i for i in list_checkpoints(directory)[-1].manifest.stored if i.entry.name == "tensors/u"]
    assert item.entry.nbytes > 2 << 30
    for number, (count, how, source) in enumerate(
        [(3, "columns", "step"), (1, "rows", "step"), (2, "columns", "memory"), (1, "rows", "memory")], start=2
    ):
        dies = number in (3, 4)
        done = ranks("huge", count, f"A{number}", **facts, how=how, save=number, dies=dies)
        assert done.codes == [-9 if dies else 0] * count, done.errors
        for said in done.said if not dies else ():
            assert (said["step"], said["right"]) == (number - 1, True)
            assert said["source"].startswith(source)
