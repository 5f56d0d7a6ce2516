"""An optimizer's state by the names of parameters: other orders, groups, wrappers, stages; and by numbers as before."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from transom_hpc.ckpt import Checkpointer, fill
from transom_hpc.ckpt.state import Walked, walk

sys.path.insert(0, str(Path(__file__).parent))
from meshes import stored, take

SIZES = (3, 4, 5, 6, 7)


def model(begin: int = 0, end: int = 4) -> torch.nn.Module:
    """Layers begin to end of a stack, each called by its number in the whole."""
    made = torch.nn.Module()
    for i in range(begin, end):
        made.add_module(f"layer{i}", torch.nn.Linear(SIZES[i], SIZES[i + 1]))
    return made


def trained(module: torch.nn.Module, groups: Any = None, steps: int = 2, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer whose state says by its values which parameter it belongs to."""
    optimizer = torch.optim.AdamW(groups or module.parameters(), **{"lr": 0.1, **settings})
    torch.manual_seed(7)
    for _ in range(steps):
        for _, parameter in sorted(module.named_parameters()):
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return optimizer


def wrapped(how: str, module: torch.nn.Module) -> torch.nn.Module:
    if how == "compiled":
        return torch.compile(module, backend="eager")  # type: ignore[return-value]
    for name, part in list(module.named_children()):
        if how == "compiled inside":
            setattr(module, name, torch.compile(part, backend="eager"))
        elif how == "recomputed inside":
            setattr(module, name, checkpoint_wrapper(part))
        elif how == "both inside":
            setattr(module, name, torch.compile(checkpoint_wrapper(part), backend="eager"))
    return module


def restore(ranks: Sequence[Walked], own: int, state: Any) -> fill.Match:
    """What a rank restores that finds its own documents, and those of others, as files would hold them."""
    entries, wholes = stored(ranks)
    mine = ranks[own].structure
    others = [
        {key: node for key, node in walked.structure.items() if mine.get(key) != node}
        for number, walked in enumerate(ranks)
        if number != own
    ]
    found = fill.match(mine, entries, state, others=others)
    if not found.complain(extras=False):
        take(found, wholes)
    return found


def moments(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    inner = module._orig_mod if hasattr(module, "_orig_mod") else module
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): optimizer.state.get(parameter)
        for name, parameter in inner.named_parameters()
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys() and all(torch.equal(a[name][key], b[name][key]) for key in a[name])
        for name in a
    )


def test_names_in_the_checkpoint() -> None:
    one = model(0, 1)
    names = {leaf.name for leaf in walk({"m": one, "o": trained(one)}).leaves}
    assert {"tensors/m/layer0.weight", "tensors/o/state/layer0.weight/exp_avg"} <= names
    assert not any("/state/0/" in name for name in names)


WRAPPERS = ["", "compiled", "compiled inside", "recomputed inside", "both inside"]


@pytest.mark.parametrize("how", WRAPPERS[1:])
def test_wrappers_change_no_name(how: str) -> None:
    plain = model(0, 2)
    optimizer = trained(plain)
    other = wrapped(how, model(0, 2))
    new = torch.optim.AdamW(other.parameters())
    for before, after in (((plain, optimizer), (other, new)), ((other, new), (model(0, 2), None))):
        to, opt = after[0], after[1] or torch.optim.AdamW(after[0].parameters())
        found = restore([walk({"m": before[0], "o": before[1]})], 0, {"m": to, "o": opt})
        assert found.complain() == ""
        assert same(moments(plain, optimizer), moments(to, opt))
        assert [p.tolist() for p in to.parameters()] == [p.tolist() for p in plain.parameters()]


def test_parameters_that_are_elsewhere_between_passes_are_found() -> None:
    """As those of FSDP2 are, until the module is asked for its state."""
    one = model(0, 1)
    optimizer = trained(one)
    layer = one.layer0
    kept = layer.weight
    del layer.weight
    layer.weight = kept.detach()
    layer.register_state_dict_pre_hook(lambda *_: (delattr(layer, "weight"), setattr(layer, "weight", kept)))
    names = {leaf.name for leaf in walk({"o": optimizer, "m": one}).leaves}
    assert "tensors/o/state/layer0.weight/exp_avg" in names


def test_how_a_step_is_computed_is_the_programs_own() -> None:
    one, other = model(0, 1), model(0, 1)
    optimizer = trained(one, foreach=True)
    new = torch.optim.AdamW(other.parameters(), foreach=False)
    assert restore([walk({"m": one, "o": optimizer})], 0, {"m": other, "o": new}).complain() == ""
    assert (new.param_groups[0]["foreach"], new.param_groups[0]["lr"]) == (False, 0.1)


def test_a_module_with_hooks_is_given_its_own_names() -> None:
    one, other = wrapped("compiled inside", model(0, 2)), wrapped("compiled inside", model(0, 2))
    given: list[str] = []
    other.register_load_state_dict_pre_hook(lambda _, state, *__: given.extend(state))
    assert restore([walk({"m": one})], 0, {"m": other}).complain() == ""
    assert given == list(other.state_dict())
    assert "layer0._orig_mod.weight" in given


def test_names_of_compiled_parts_as_they_once_were() -> None:
    inside = wrapped("compiled inside", model(0, 2))
    walked = walk({"m": dict(inside.state_dict())})
    walked.structure["m"][2] = ["module", walked.structure["m"][2]]
    new = wrapped("compiled inside", model(0, 2))
    assert restore([walked], 0, {"m": new}).complain() == ""
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), inside.parameters(), strict=True))


def test_another_order_and_other_groups() -> None:
    one = model()
    optimizer = trained(one)
    other = model()
    backwards = [p for _, p in sorted(other.named_parameters(), reverse=True)]
    new = torch.optim.AdamW([{"params": backwards[:3], "lr": 9}, {"params": backwards[3:]}], weight_decay=9)
    assert restore([walk({"o": optimizer, "m": one})], 0, {"m": other, "o": new}).complain() == ""
    assert same(moments(one, optimizer), moments(other, new))
    assert [(group["lr"], group["weight_decay"]) for group in new.param_groups] == [(0.1, 0.01)] * 2
    assert [len(group["params"]) for group in new.param_groups] == [3, 5]
    new.step()


def by_decay(module: torch.nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.5, "lr": 0.3},
        {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]


def test_settings_go_with_the_parameters() -> None:
    one, other = model(), model()
    optimizer = trained(one, by_decay(one))
    groups = [dict(group, weight_decay=9, lr=9) for group in reversed(by_decay(other))]
    new = torch.optim.AdamW(groups)
    assert restore([walk({"m": one, "o": optimizer})], 0, {"m": other, "o": new}).complain() == ""
    assert [(g["weight_decay"], g["lr"]) for g in new.param_groups] == [(0.0, 0.1), (0.5, 0.3)]
    mixed = torch.optim.AdamW(other.parameters())
    found = restore([walk({"m": one, "o": optimizer})], 0, {"m": other, "o": mixed})
    assert found.misshaped == [
        "o/param_groups/0 (its parameters were stored in groups that differ in lr, weight_decay)"
    ]


def test_parameters_that_are_only_on_one_side_are_named() -> None:
    one, other = model(0, 3), model(1, 4)
    walked = walk({"m": one, "o": trained(one)})
    new = torch.optim.AdamW(other.parameters())
    found = restore([walked], 0, {"m": other, "o": new})
    assert "m/layer3.weight, o/state/layer3.bias" in found.complain(extras=False).replace("m/layer3.bias, ", "")
    assert "o/state/layer0.weight" in found.complain()


STAGES = [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]]


@pytest.mark.parametrize("before", STAGES, ids=str)
@pytest.mark.parametrize("after", STAGES, ids=str)
def test_stages_cut_otherwise(before: Any, after: Any) -> None:
    """Each rank holds some layers; the settings are the same in all of them."""
    torch.manual_seed(1)
    whole = model()
    stages = [model(*cut) for cut in before]
    for stage in stages:
        stage.load_state_dict(whole.state_dict(), strict=False)
    reference: dict[str, Any] = {}
    walks = []
    for rank, stage in enumerate(stages):
        optimizer = trained(stage, by_decay(stage), steps=rank + 1)
        reference |= moments(stage, optimizer)
        reference |= {f"{name}!": parameter.detach().clone() for name, parameter in stage.named_parameters()}
        walks.append(walk({"m": stage, "o": optimizer, "step": 3}))
    unclaimed = []
    for rank, cut in enumerate(after):
        live = model(*cut)
        new = torch.optim.AdamW(by_decay(live))
        state = {"m": live, "o": new, "step": 0}
        found = restore(walks, min(rank, len(walks) - 1), state)
        assert found.complain(extras=False) == ""
        assert same(moments(live, new), {name: reference[name] for name, _ in live.named_parameters()})
        assert all(torch.equal(p, reference[f"{name}!"]) for name, p in live.named_parameters())
        assert [(g["weight_decay"], g["lr"]) for g in new.param_groups] == [(0.5, 0.3), (0.0, 0.1)]
        assert state["step"] == 3
        new.step()
        unclaimed.append({*found.extra, *found.elsewhere})
    assert set.intersection(*unclaimed) == set(), "all has a place somewhere"


def test_what_no_stage_has_a_place_for_is_reported_by_all() -> None:
    stages = [model(0, 2), model(2, 4)]
    walks = [walk({"m": stage, "o": trained(stage)}) for stage in stages]
    unclaimed = []
    for rank, cut in enumerate([(0, 1), (2, 4)]):
        live = model(*cut)
        found = restore(walks, rank, {"m": live, "o": torch.optim.AdamW(live.parameters())})
        unclaimed.append({*found.extra, *found.elsewhere})
    assert set.intersection(*unclaimed) == {
        f"{place}/layer1.{kind}" for place in ("m", "o/state") for kind in ("weight", "bias")
    }


def test_what_other_ranks_disagree_about_is_not_borrowed() -> None:
    walks = [walk({"m": {"a": rank, "same": 5, "text": "x"}, f"only{rank}": rank}) for rank in range(3)]
    found = restore(walks, 0, {"m": {"a": -1, "same": -1, "text": ""}, "only0": -1})
    assert found.complain(extras=False) == ""
    assert {*found.elsewhere} == {"only1", "only2"}
    entries, _ = stored(walks)
    live = {"m": {"a": -1, "same": -1}, "only1": -1}
    found = fill.match({}, entries, live, others=[walked.structure for walked in walks])
    assert found.missing == ["m/a"]
    take(found, {})
    assert live == {"m": {"a": -1, "same": 5}, "only1": 1}


@pytest.mark.parametrize(
    "values",
    [(1, 2), (math.inf, -math.inf), (torch.ones(2), {"deep": 1}), ({"deep": 1}, 5), ([1], [1, 2]), ((1, 2), [1, 2])],
    ids=repr,
)
def test_what_ranks_have_in_different_ways_is_nobody_elses(values: tuple[Any, Any]) -> None:
    ranks = [walk({"m": {"x": value, "same": 1}}) for value in values]
    documents = [walked.structure for walked in ranks]
    live = {"m": {"x": 7, "same": 0}}
    found = fill.match({}, stored(ranks)[0], live, others=documents)
    assert (found.missing, found.misshaped) == (["m/x"], [])
    own = fill.match(documents[0], stored(ranks)[0], {"m": {"x": values[0], "same": 0}}, others=documents[1:])
    assert own.complain() == ""


def test_what_only_others_have_is_told_apart_from_what_was_stored_here() -> None:
    walks = [walk({"m": {"mine": 1, "both": 1}}), walk({"m": {"theirs": 1, "both": 1}})]
    found = fill.match(walks[0].structure, {}, {"m": {"both": 1}}, others=[walks[1].structure])
    assert (found.extra, found.elsewhere) == (["m/mine"], ["m/theirs"])


def test_without_a_module_there_are_numbers() -> None:
    one = model(0, 2)
    optimizer = trained(one)
    for state in (
        {"o": optimizer},
        {"o": optimizer, "m": one.state_dict()},
        {"o": optimizer, "m": one, "n": one.layer0},
    ):
        numbered = {leaf.name.split("/")[3] for leaf in walk(state).leaves if "/state/" in leaf.name}
        assert numbered == ({"0", "1", "2", "3"} if "n" not in state else {"0", "1", "layer1.weight", "layer1.bias"})


@pytest.mark.parametrize("named_before", [True, False])
@pytest.mark.parametrize("named_after", [True, False])
def test_names_and_numbers_fit_both_ways(named_before: bool, named_after: bool) -> None:
    one, other = model(), model()
    optimizer = trained(one, by_decay(one))
    new = torch.optim.AdamW(by_decay(other), lr=9)
    before: dict[str, Any] = {"o": optimizer, **({"m": one} if named_before else {})}
    after: dict[str, Any] = {"o": new, **({"m": other} if named_after else {})}
    walked = walk(before)
    if named_after and not named_before:
        walked.structure |= walk({"m": one}).structure
        walked.leaves += walk({"m": one}).leaves
    assert restore([walked], 0, after).complain(extras=False) == ""
    assert same(moments(one, optimizer), moments(other, new))
    if not named_before or not named_after:
        short = torch.optim.AdamW([{"params": list(other.parameters())[:2]}, {"params": list(other.parameters())[2:]}])
        found = restore([walked], 0, {**after, "o": short})
        assert found.misshaped == ["o/param_groups (stored: [4, 4] parameters in its groups; here: [2, 6])"]


def test_two_models_with_equal_names_and_one_optimizer() -> None:
    a, b = model(0, 1), model(0, 1)
    both = torch.nn.ModuleDict({"a": a, "b": b})
    optimizer = trained(both)
    walked = walk({"nets": {"a": a, "b": b}, "o": optimizer})
    assert {leaf.name.split("/")[3] for leaf in walked.leaves if "/state/" in leaf.name} == {
        f"nets.{net}.layer0.{kind}" for net in "ab" for kind in ("weight", "bias")
    }
    c, d = model(0, 1), model(0, 1)
    new = torch.optim.AdamW([*d.parameters(), *c.parameters()])
    assert restore([walked], 0, {"nets": {"a": c, "b": d}, "o": new}).complain() == ""
    assert same(moments(both, optimizer), moments(torch.nn.ModuleDict({"a": c, "b": d}), new))


def test_tied_weights_have_one_name() -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    optimizer = trained(tied)
    other = copy.deepcopy(tied)
    new = torch.optim.AdamW(other.parameters())
    assert restore([walk({"m": tied, "o": optimizer})], 0, {"m": other, "o": new}).complain() == ""
    assert same(moments(tied, optimizer), moments(other, new))


def test_settings_that_are_tensors() -> None:
    one, other = model(0, 1), model(0, 1)
    optimizer = trained(one, lr=torch.tensor(0.25))
    new = torch.optim.AdamW(list(other.parameters())[::-1], lr=torch.tensor(9.0))
    rate = new.param_groups[0]["lr"]
    assert restore([walk({"m": one, "o": optimizer})], 0, {"m": other, "o": new}).complain() == ""
    assert new.param_groups[0]["lr"] == 0.25
    assert rate == 0.25, "filled in place"


def test_a_parameter_that_never_had_a_gradient() -> None:
    one, other = model(0, 2), model(0, 2)
    one.layer1.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(one.parameters())
    for p in one.layer0.parameters():  # type: ignore[union-attr]
        p.grad = torch.ones_like(p)
    optimizer.step()
    new = trained(other)
    assert restore([walk({"m": one, "o": optimizer})], 0, {"m": other, "o": new}).complain() == ""
    assert set(new.state) == set(other.layer0.parameters())  # type: ignore[union-attr]


def test_named_parameters_keep_their_own_names() -> None:
    one, other = model(0, 2), model(0, 2)
    optimizer = torch.optim.AdamW(one.named_parameters())
    for p in one.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    backwards = list(other.named_parameters())[::-1]
    new = torch.optim.AdamW(backwards)
    assert restore([walk({"m": one, "o": optimizer})], 0, {"m": other, "o": new}).complain() == ""
    assert new.param_groups[0]["param_names"] == [name for name, _ in backwards]
    assert same(moments(one, optimizer), moments(other, new))


def test_not_strict_leaves_what_does_not_fit(directory: Path) -> None:
    one, other = model(0, 2), model(0, 3)
    optimizer = trained(one)
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"m": one, "o": optimizer}, block=True)
    new = trained(other)
    kept = new.state[other.layer2.weight]["exp_avg"].clone()  # type: ignore[union-attr,index]
    with Checkpointer(directory) as ckpt, pytest.warns(Warning, match=r"o/state/layer2\.weight"):
        ckpt.restore({"m": other, "o": new}, strict=False)
    assert torch.equal(new.state[other.layer2.weight]["exp_avg"], kept)  # type: ignore[union-attr,index]
    got = {name: value for name, value in moments(other, new).items() if "layer2" not in name}
    assert same(moments(one, optimizer), got)
    single = torch.optim.AdamW(list(other.parameters())[:1])
    with Checkpointer(directory) as ckpt, pytest.warns(Warning, match="o/param_groups"):
        ckpt.restore({"o": single}, strict=False)
    assert not single.state
