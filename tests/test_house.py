"""The house rules: who imports whom, what the package shows, and what the help must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import transom_hpc

ROOT = Path(transom_hpc.__file__).resolve().parent
# Floors of the package; what is not a folder lives on floor 3, the surface on 4.
FLOORS = {"base": 0, "slurm": 1, "ckpt": 1, "monitors": 1, "tol": 2, "lab": 3, "cli": 4, "__main__": 5}
# Decisions and parsers: no process, clock, file, or heavy library.
PURE = {
    "slurm": ["environment", "hosts", "jobid", "resubmission", "states", "text", "times"],
    "ckpt": ["borrow", "dtypes", "interval", "layout", "manifest", "portions", "reads", "retention", "stock"],
    "monitors": ["reading", "detect_silence", "succession", "verdict"],
    "tol": [
        "attempt",
        "behind",
        "causes",
        "divergence",
        "exclusion",
        "exits",
        "goodput",
        "hang",
        "history",
        "launches",
        "phases",
        "reliability",
        "rules",
        "state",
    ],
}
IMPURE = {"os", "subprocess", "threading", "time", "shutil", "socket", "torch", "h5py", "mpi4py", "psutil", "signal"}
# Which file may import a heavy library at module level.
HEAVY = {"torch", "h5py", "mpi4py", "pandas", "rich", "submitit"}


def _folders() -> list[Path]:
    return [ROOT, *(path for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists())]


def _files() -> list[tuple[str, Path]]:
    """(place, file): the place is the folder's name, or the module's for those at the top."""
    found = []
    for folder in _folders():
        for path in sorted(folder.glob("*.py")):
            found.append((path.stem if folder == ROOT else folder.name, path))
    return found


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def _place(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "transom_hpc" and len(parts) > 1 else None


def _is_place(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()


def test_files_are_found() -> None:
    places = {place for place, _ in _files()}
    assert {"base", "slurm", "ckpt", "monitors", "tol", "lab", "cli", "program", "status"} <= places


@pytest.mark.parametrize(("place", "path"), _files(), ids=lambda value: str(getattr(value, "stem", value)))
def test_imports_only_go_down(place: str, path: Path) -> None:
    if path == ROOT / "__init__.py":
        return  # the lazy public names: the test of __all__ covers it
    floor = FLOORS.get(place, 3)
    for module in _imports(path):
        other = _place(module)
        if other is None or other == place or not _is_place(other):
            continue
        theirs = FLOORS.get(other, 3)
        assert theirs < floor or (theirs == floor == 3), f"{path.name} on floor {floor} imports {module} on {theirs}"


def test_nothing_at_the_top_is_circular() -> None:
    arrows: dict[str, set[str]] = {}
    for place, path in _files():
        if FLOORS.get(place, 3) == 3:
            arrows.setdefault(place, set()).update(
                other for module in _imports(path) if (other := _place(module)) and FLOORS.get(other, 3) == 3
            )
    seen: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in seen:
            for other in arrows.get(name, set()) - {name}:
                walk(other, (*path, name))
            seen.add(name)

    for name in arrows:
        walk(name, ())


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder, names in PURE.items() for name in names])
def test_decisions_touch_nothing(folder: str, name: str) -> None:
    modules = {module.split(".")[0] for module in _imports(ROOT / folder / f"{name}.py")}
    assert not modules & IMPURE


def test_public_names() -> None:
    names = transom_hpc.__all__
    assert names == sorted(names)
    assert set(names) == set(transom_hpc._HOMES)
    for name in names:
        assert getattr(transom_hpc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = transom_hpc.nothing


def _loaded(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(answer.stdout.split()) & (HEAVY | {"numpy"})


def test_import_loads_nothing_heavy() -> None:
    assert _loaded("import transom_hpc") == set()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["status", "--help"], ["history", "--help"], ["submit", "--help"], ["lab", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"sys.argv = ['transom', *{arguments!r}]\nfrom transom_hpc.cli import main\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main()"
    )
    assert _loaded(code) == set()


def test_status_loads_nothing_heavy() -> None:
    assert _loaded("import transom_hpc.status, transom_hpc.cli.status") == set()


@pytest.mark.parametrize("name", ["ckpt", "monitors"])
def test_no_second_copy(name: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); import {name}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 1
    assert f"import transom_hpc.{name}, not {name}" in answer.stderr
