"""export and import: checkpoints into files of other tools, and out of them."""

from __future__ import annotations

import json
from pathlib import Path

import click

from transom_hpc.base.errors import UsageError
from transom_hpc.cli.checkpoints import JSON, RUN, chosen, progress
from transom_hpc.cli.text import size

_SHOWN = 10


@click.command()
@RUN
@click.argument("steps", nargs=-1, type=int, metavar="[STEP]")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--only", default="", metavar="PLACE", help="Only what is below this place of the state, such as model.")
@click.option("--rank", type=click.IntRange(min=0), help="Take what this rank has for itself, too.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@JSON
def export(
    run: Path, steps: tuple[int, ...], file: Path, only: str, rank: int | None, force: bool, as_json: bool
) -> None:
    """Write a checkpoint (the newest one without STEP) into a .safetensors, .pt or .pth file.

    A .pt file has the state as the program gave it, and is for torch.load(FILE, weights_only=True, mmap=True). A
    .safetensors file has tensors only, and names are joined by '.'. With --only model, either has the keys of the
    module's state_dict. What a file can't hold, or what each rank has for itself, is left out and named.

    Every byte is compared with its checksum. Any size will do; little memory is used.
    """
    from transom_hpc.ckpt.catalog import read_checkpoint
    from transom_hpc.ckpt.export import export as write
    from transom_hpc.ckpt.export import plan

    if len(steps) > 1:
        raise UsageError("export takes RUN, one STEP at most, and FILE")
    ((_, path),) = chosen(run, steps)
    checkpoint = read_checkpoint(path)
    made = plan(checkpoint, file, only.strip("/"), rank)
    with progress("exporting", sum(slot.array.nbytes for slot in made.slots)) as (advance, _):
        done = write(checkpoint, made, file, force, advance)
    if as_json:
        facts = {"path": str(done.path), "step": checkpoint.step, "bytes": done.nbytes, "arrays": done.arrays}
        click.echo(json.dumps({**facts, "tied": done.tied, "left_out": _to_json(done.left_out)}, indent=2))
        return
    click.echo(f"step {checkpoint.step}: {done.arrays} arrays, {size(done.nbytes)}, in {done.path}")
    for name, same in done.tied.items():
        click.echo(f"  {name} is tied to {same}, which stands for both")
    _print(done.left_out)


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path), metavar="SOURCE")
@RUN
@click.option("--step", required=True, type=click.IntRange(min=0), help="Step of the new checkpoint.")
@click.option("--as", "key", default="", metavar="KEY", help="Key of the state under which all of it stands.")
@JSON
def import_(source: Path, run: Path, step: int, key: str, as_json: bool) -> None:
    """Make a checkpoint out of a .safetensors file, a torch file, or a folder of torch.distributed.checkpoint.

    RUN is a run directory or a folder for step-* folders. What looks like a module's or an optimizer's state_dict
    becomes one; a file of nothing but tensors becomes the state's `model`, unless --as says otherwise. The program's
    restore takes it, as it takes the newest step.

    Nothing is unpickled but what torch.load(weights_only=True) takes; the index of a torch.distributed.checkpoint
    folder is a pickle that torch opens, so import only folders that you trust. A step that is there is not replaced,
    and nothing is done while a program writes there.
    """
    from transom_hpc.ckpt import catalog
    from transom_hpc.ckpt.arriving import arrive
    from transom_hpc.ckpt.importing import import_state

    directory = _directory(run)
    arrived = arrive(source)
    total = sum(file.stat().st_size for file in source.rglob("*")) if source.is_dir() else source.stat().st_size
    with progress("importing", total) as (advance, _):
        done = import_state(arrived, directory, step, key, advance)
    newest = max((found for found, _ in catalog.folders(directory)), default=step)
    if as_json:
        facts = {"path": str(done.path), "step": done.step, "bytes": done.nbytes, "arrays": done.arrays}
        facts |= {"places": done.places, "newest": newest == step, "left_out": _to_json(done.left_out)}
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"step {done.step}: {done.arrays} arrays, {size(done.nbytes)}, in {done.path}")
    for name, kind in done.places.items():
        click.echo(f"  {name}: {kind if kind == 'plain' else f'as of {kind}s'}")
    if newest != step:
        click.echo(f"  restore takes the newest step, which is {newest}")
    _print(done.left_out)


def _directory(run: Path) -> Path:
    """Where the checkpoints of a run are, or will be."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"{run} is no folder", path=run)
    inner = run / "checkpoints"
    return inner if inner.is_dir() or (run / "spec.json").exists() else run


def _to_json(left_out: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "why": why} for name, why in left_out]


def _print(left_out: list[tuple[str, str]]) -> None:
    for name, why in left_out[:_SHOWN]:
        click.echo(f"  left out: {name} ({why})")
    if len(left_out) > _SHOWN:
        click.echo(f"  and {len(left_out) - _SHOWN} more; --json names all")
