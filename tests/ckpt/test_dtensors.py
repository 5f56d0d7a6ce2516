"""DTensors of any mesh and placement: which part a rank holds, what is refused, and from any cut to any other."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import dtensors, fill, leaves
from transom_hpc.ckpt.state import walk

sys.path.insert(0, str(Path(__file__).parent))
from meshes import mesh, split, stored, take


@st.composite
def shapes(draw: Any) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))


@st.composite
def cuts(draw: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[Any]]:
    """A mesh, and how an array of this shape is placed on it; several may cut one dimension, either one first."""
    ranks = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    places: list[Any] = [
        draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])) for _ in ranks
    ]
    for axis, placement in enumerate(places):
        inner = math.prod(
            n for n, other in zip(ranks[axis + 1 :], places[axis + 1 :], strict=True) if other == placement
        )
        if isinstance(placement, Shard) and inner > 1 and draw(st.booleans()):
            places[axis] = _StridedShard(placement.dim, split_factor=inner)
    everywhere = itertools.product(*(range(n) for n in ranks))
    assume(all(dtensors.is_together(shape, ranks, at, tuple(places)) for at in everywhere))
    return ranks, places


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parts_cover_the_whole(data: Any) -> None:
    shape = data.draw(shapes())
    ranks, places = data.draw(cuts(shape))
    seen = np.zeros(shape, dtype=int)
    for at in itertools.product(*(range(n) for n in ranks)):
        local, start = dtensors.box(shape, ranks, at, tuple(places))
        seen[tuple(slice(b, b + n) for b, n in zip(start, local, strict=True))] += 1
    copies = math.prod(n for n, place in zip(ranks, places, strict=True) if isinstance(place, Replicate))
    assert (seen == copies).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_from_any_cut_to_any_other(data: Any) -> None:
    shape = data.draw(shapes())
    before, after = data.draw(cuts(shape)), data.draw(cuts(shape))
    whole = torch.arange(float(math.prod(shape))).view(shape)
    walks = [walk({"w": split(whole, before[0], rank, before[1])}) for rank in range(math.prod(before[0]))]
    entries, wholes = stored(walks)
    assert all(walked.structure == walks[0].structure for walked in walks)
    for rank in range(math.prod(after[0])):
        live = split(torch.full(shape, -1.0), after[0], rank, after[1])
        mine = live._local_tensor
        matched = fill.match(walks[0].structure, entries, {"w": live})
        assert not matched.complain()
        take(matched, wholes)
        assert live._local_tensor is mine
        assert torch.equal(mine, split(whole, after[0], rank, after[1]).to_local())


def test_plain_and_cut_fit_both_ways() -> None:
    whole = torch.arange(35.0).view(7, 5)
    entries, wholes = stored([walk({"w": whole})])
    live = split(torch.zeros(7, 5), (2, 2), 3, [Shard(0), Shard(1)])
    before = live._version, live._local_tensor._version
    take(fill.match(walk({"w": whole}).structure, entries, {"w": live}), wholes)
    assert torch.equal(live.to_local(), whole[4:, 3:])
    assert live._version > before[0], "autograd is told, for the whole as for the part"
    walks = [walk({"w": split(whole, (3,), rank, [Shard(0)])}) for rank in range(3)]
    entries, wholes = stored(walks)
    plain = torch.zeros(7, 5)
    take(fill.match(walks[0].structure, entries, {"w": plain}), wholes)
    assert torch.equal(plain, whole)


REFUSED: dict[str, Any] = {
    "partial": ([Partial()], r"P\(sum\).* is not summed up yet.*redistribute"),
    "average": ([Partial("avg")], "is not summed up yet"),
    "mask": ([_MaskPartial(offset_shape=torch.Size((4, 4)), offset_dim=0)], "is not summed up yet.*redistribute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_summed_up_is_refused_by_name(name: str) -> None:
    places, says = REFUSED[name]
    tensor = DTensor.from_local(torch.ones(4, 4), mesh((2,), 0), places, run_check=False)
    with pytest.raises(StateError, match=f"^deep/{name}: a DTensor .*{says}"):
        walk({"deep": {name: tensor}})


class Strange(Placement):
    """One that this version does not know."""


def test_a_placement_that_is_not_known_is_refused() -> None:
    tensor = DTensor.from_local(torch.ones(4, 4), mesh((2,), 0), [Replicate()], run_check=False)
    tensor._spec.placements = (Strange(),)
    with pytest.raises(
        StateError, match=r"^w: a DTensor with the placement .*Strange.* can't be saved; call redistribut"
    ):
        walk({"w": tensor})


def test_a_part_of_another_size_than_its_place_is_refused() -> None:
    tensor = DTensor.from_local(torch.ones(3, 4), mesh((2,), 1), [Shard(0)], run_check=False)  # 3 + 4 rows, in truth
    live = split(torch.ones(7, 4), (2,), 0, [Shard(0)])
    live._local_tensor = torch.ones(3, 4)
    walk({"w": tensor})
    with pytest.raises(
        StateError, match=r"w: .*should have \[4, 4\] on this rank, and has \[3, 4\].*distribute_tensor"
    ):
        walk({"w": live})


def test_rows_that_are_no_block_are_refused() -> None:
    tensor = DTensor.from_local(
        torch.ones(4, 2),
        mesh((2,), 0),
        [_StridedShard(0, split_factor=2)],
        run_check=False,
        shape=torch.Size((8, 2)),
        stride=(2, 1),
    )
    with pytest.raises(StateError, match=r"w: .*rows here that are no single block; call redistribute"):
        walk({"w": tensor})


def test_a_rank_outside_the_mesh_has_nothing_and_wants_nothing() -> None:
    outside = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=5)
    tensor = DTensor.from_local(
        torch.empty(0), outside, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,)
    )
    walked = walk({"w": tensor})
    assert walked.leaves == []
    entries, _ = stored([walk({"w": torch.ones(4)})])
    found = fill.match(walked.structure, entries, {"w": tensor})
    assert (found.complain(), found.targets) == ("", {})


def parameter(rank: int = 1) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    whole = torch.arange(35.0).view(7, 5)
    made = torch.nn.Parameter(split(whole, (2, 2), rank, [Shard(0), Shard(1)]))
    optimizer = torch.optim.AdamW([made], lr=0.1)
    # A step would do, were it not that torch remembers the shapes of one rank for all in this process.
    moments = {
        key: split(torch.full((7, 5), value), (2, 2), rank, [Shard(0), Shard(1)])
        for key, value in (("exp_avg", 0.1), ("exp_avg_sq", 0.2))
    }
    optimizer.state[made] = {"step": torch.tensor(1.0), **moments}
    return made, optimizer


def test_what_optimizers_own_is_copied_later() -> None:
    made, optimizer = parameter()
    module = torch.nn.Module()
    module.register_parameter("w", made)
    walked = walk({"model": module, "optimizer": optimizer, "other": split(torch.ones(4), (2, 2), 0, [Shard(0)] * 2)})
    lazy = {leaf.name: leaf.lazy for leaf in walked.leaves}
    assert lazy == {
        "tensors/model/w": True,
        "tensors/optimizer/state/w/step": True,
        "tensors/optimizer/state/w/exp_avg": True,
        "tensors/optimizer/state/w/exp_avg_sq": True,
        "tensors/other": False,
    }
    assert not any(leaves.torn(leaf) for leaf in walked.leaves)


CHANGES: dict[str, Any] = {
    "the whole": lambda p: p.mul_(2),
    "the part": lambda p: p.to_local().mul_(2),
    "an element of the part": lambda p: p.to_local()[0].fill_(2),
    "a detached whole": lambda p: p.detach().zero_(),
    "out": lambda p: torch.mul(p, 2, out=p.detach()),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_moves_a_counter(how: str) -> None:
    made, optimizer = parameter()
    module = torch.nn.Module()
    module.register_parameter("w", made)
    for state in ({"model": module, "optimizer": optimizer}, {"optimizer": optimizer, "w": made.detach()}):
        walked = walk(state)
        (leaf,) = [leaf for leaf in walked.leaves if leaf.name in ("tensors/model/w", "tensors/w")]
        assert leaves.torn(leaf) == ""
        with torch.no_grad():
            CHANGES[how](made)
        assert "was changed" in leaves.torn(leaf)
    moment = optimizer.state[made]["exp_avg"]
    (leaf,) = [leaf for leaf in walk({"o": optimizer}).leaves if leaf.name.endswith("exp_avg")]
    CHANGES[how](moment)
    assert "was changed" in leaves.torn(leaf)


def test_tied_parts_are_kept_once() -> None:
    part = split(torch.ones(8), (2,), 1, [Shard(0)])
    other = DTensor.from_local(part.to_local(), mesh((2, 2), 1), [Shard(0), Replicate()], run_check=False)
    walked = walk({"a": part, "b": part.detach(), "plain": part.to_local(), "elsewhere": other})
    assert [leaf.name for leaf in walked.leaves] == ["tensors/a", "tensors/plain", "tensors/elsewhere"]


def test_an_optimizer_before_its_first_step_gets_parts_like_its_parameters() -> None:
    made, optimizer = parameter(rank=0)
    others = [parameter(rank) for rank in (1, 2, 3)]
    walks = [walk({"o": o}) for _, o in [(made, optimizer), *others]]
    entries, wholes = stored(walks)
    whole = torch.zeros(7, 5)
    for ranks, places in (
        ((3,), [Shard(1)]),
        ((2, 5), [Shard(1), Shard(1)]),
        ((9,), [Shard(0)]),
        ((2,), [Replicate()]),
    ):
        for rank in range(math.prod(ranks)):
            fresh = torch.nn.Parameter(split(whole, ranks, rank, places))
            new = torch.optim.AdamW([fresh])
            take(fill.match(walks[0].structure, entries, {"o": new}), wholes)
            assert new.param_groups[0]["lr"] == 0.1
            state = new.state[fresh]
            assert type(state["step"]) is torch.Tensor
            assert state["step"] == 1
            for key in ("exp_avg", "exp_avg_sq"):
                assert isinstance(state[key], DTensor)
                assert (state[key].placements, state[key].shape) == (tuple(places), (7, 5))
                assert state[key].to_local().shape == fresh.to_local().shape
            assert (state["exp_avg"].to_local() == 0.1).all()
    plain = torch.nn.Parameter(whole)
    new = torch.optim.AdamW([plain])
    take(fill.match(walks[0].structure, entries, {"o": new}), wholes)
    assert torch.equal(new.state[plain]["exp_avg"], torch.full((7, 5), 0.1))


def test_objects_that_keep_parts_get_parts_back() -> None:
    class Ema:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    whole = torch.arange(35.0).view(7, 5)
    walks = [walk({"ema": Ema(split(whole, (4,), rank, [Shard(0)]))}) for rank in range(4)]
    entries, wholes = stored(walks)
    ema = Ema(split(torch.zeros(7, 5), (2,), 1, [Shard(1)]))
    take(fill.match(walks[0].structure, entries, {"ema": ema}), wholes)
    assert isinstance(ema.value, DTensor)
    assert torch.equal(ema.value.to_local(), whole[:, 3:])


def test_a_step_count_is_no_part_though_it_looks_like_one() -> None:
    scalar = torch.nn.Parameter(split(torch.tensor(5.0), (2,), 0, [Replicate()]))
    optimizer = torch.optim.AdamW([scalar])
    moments = {key: split(torch.tensor(0.5), (2,), 0, [Replicate()]) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[scalar] = {"step": torch.tensor(3.0), **moments}
    walked = walk({"o": optimizer})
    entries, wholes = stored([walked])
    new = torch.optim.AdamW([scalar])
    take(fill.match(walked.structure, entries, {"o": new}), wholes)
    state = new.state[scalar]
    assert [type(state[key]) for key in ("step", "exp_avg")] == [torch.Tensor, DTensor]
    assert (state["step"], state["exp_avg"].to_local()) == (3, 0.5)


def test_a_module_that_hands_out_copies_gets_them_back() -> None:
    def module(value: float) -> Any:
        made = torch.nn.Module()
        made.register_parameter("w", torch.nn.Parameter(split(torch.full((6, 2), value), (2,), 0, [Shard(0)])))

        def copied(_: Any, state: dict[str, Any], *__: Any) -> None:
            state["w"] = split(torch.full((6, 2), value), (2,), 0, [Shard(0)])

        made._register_state_dict_hook(copied)
        return made

    walked = walk({"m": module(3.0)})
    entries, wholes = stored([walked])
    live = module(0.0)
    take(fill.match(walked.structure, entries, {"m": live}), wholes)
    assert (live.w.to_local() == 3).all()
