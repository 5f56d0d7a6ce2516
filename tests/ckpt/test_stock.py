"""What a rank may have of what is stored, and what has no home on another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transom_hpc.ckpt.layout import Entry, plan
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.stock import Stock, homeless, refers


def array(name: str, sums: str = "a", size: int = 4) -> Entry:
    return Entry(f"tensors/{name}", "uint8", (size,), (size,), (0,), size, (sums,))


def piece(name: str, number: int, sums: str = "a") -> Entry:
    return Entry(f"tensors/{name}", "uint8", (2,), (8,), (2 * number,), 2, (sums,))


def text(key: str, sums: str) -> Entry:
    return Entry(f"structure/{key}", "json", (9,), (9,), (0,), 9, (sums,))


def stored(*held: list[Entry]) -> list[Stored]:
    return [Stored(s.entry, s.rank, s.path, "f", 0, s.holders) for s in plan(held).shards]


def test_what_is_alike_belongs_to_everybody() -> None:
    """Stages of a pipeline: an array that only other ranks had, too."""
    saved = stored([array("a"), array("all")], [array("b"), array("all")], [array("b"), array("all")])
    for rank in range(5):
        stock = Stock(saved, rank, 3)
        assert sorted(stock.entries) == ["tensors/a", "tensors/all", "tensors/b"]
        assert stock.private == {}


def test_what_differs_belongs_to_each() -> None:
    saved = stored([array("r", "x"), array("s", "x", 5)], [array("r", "y")], [array("r", "y")])
    assert Stock(saved, 0, 3).parts["tensors/r"][0].entry.sums == ("x",)
    assert Stock(saved, 2, 3).parts["tensors/r"][0].entry.sums == ("y",)
    other = Stock(saved, 3, 3)
    assert sorted(other.entries) == ["tensors/s"]
    assert sorted(other.private) == ["tensors/r"]


def test_parts_make_a_whole_own_first() -> None:
    saved = stored(*[[piece("u", r % 4, "b" if r == 5 else "a")] for r in range(8)])
    stock = Stock(saved, 5, 8)
    whole = stock.entries["tensors/u"]
    assert (whole.shape, whole.start, whole.nbytes, whole.sums) == ((8,), (0,), 8, ())
    assert [(item.lowest, item.entry.sums) for item in stock.parts["tensors/u"]] == [
        (5, ("b",)),
        (0, ("a",)),
        (1, ("a",)),
        (2, ("a",)),
        (3, ("a",)),
    ]


def test_arrays_that_only_share_a_name_are_private() -> None:
    saved = stored([array("w", size=4)], [array("w", size=5)])
    assert Stock(saved, 1, 2).entries["tensors/w"].shape == (5,)
    assert Stock(saved, 2, 2).entries == {}


def test_documents() -> None:
    saved = stored([text("m", "0"), text("n", "all")], [text("m", "1"), text("n", "all")])
    stock = Stock(saved, 1, 2)
    assert sorted(item.entry.name for item in stock.documents) == ["structure/m", "structure/n"]
    assert [(item.entry.name, item.lowest) for item in stock.others] == [("structure/m", 0)]
    assert [item.entry.name for item in Stock(saved, 2, 2).documents] == ["structure/n"]


def test_private_things_of_ranks_that_are_gone() -> None:
    saved = stored(*[[array("rng/torch", str(r)), array("w")] for r in range(3)])
    assert homeless(Stock(saved, 0, 3), 2, {}, []) == (
        "rng/torch of rank 2 has no rank to go to: the checkpoint is of 3 ranks and here are 2"
    )
    assert homeless(Stock(saved, 3, 3), 4, {}, ["rng/torch (its bytes belong to another rank)"]) == (
        "rng/torch is kept for each rank, and there is none for rank 3: the checkpoint is of 3 ranks and here are 4"
    )
    assert homeless(Stock(saved, 3, 3), 4, {}, ["model/new"]) == ""
    assert homeless(Stock(saved, 2, 3), 4, {}, ["rng/torch"]) == ""


def test_values_of_ranks_that_are_gone() -> None:
    """A number that ranks have differently is as private as an array; a document with arrays is none."""
    saved = stored(*[[text("n", str(r)), text("model", str(r // 2))] for r in range(4)])
    number: list[Any] = [["key", "n", r] for r in range(4)]
    stages: list[Any] = [["key", "model", ["dict", [["w", "w", ["tensor", f"tensors/{i}"]]]]] for i in range(2)]
    stock = Stock(saved, 0, 4)
    assert homeless(stock, 2, {"n": number, "model": stages}, []).startswith("n of rank 2 has no rank to go to")
    assert homeless(stock, 2, {"model": stages}, []) == ""
    alone = stored([], [], [text("n", "2")])  # others may take it: nobody has another one
    assert homeless(Stock(alone, 0, 3), 2, {"n": number[2:3]}, []) == ""


def test_documents_that_refer_to_arrays() -> None:
    assert refers(["key", "m", ["list", [1, ["array", "tensors/m/0"]]]])
    assert refers(["key", "m", ["pickle", "objects/m"]])
    assert not refers(["key", "m", ["tuple", [1, ["tuple", ["x", "y"]]]]])
    assert not refers(5)


def test_a_part_of_a_rank_that_is_gone_goes_to_whoever_wants_it() -> None:
    saved = stored(*[[piece("u", r)] for r in range(4)])
    assert homeless(Stock(saved, 0, 4), 1, {}, []) == ""
    assert replace(saved[0], holders=(1, 2)).lowest == 1
