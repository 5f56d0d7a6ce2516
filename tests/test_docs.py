"""The documents say what is there: commands, links, keys, names, journal kinds, and who imports whom."""

from __future__ import annotations

import ast
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

import transom_hpc
from transom_hpc.cli import transom
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.causes import BUDGETS, Cause
from transom_hpc.tol.drawing import put_into

PACKAGE = Path(transom_hpc.__file__).resolve().parent
ROOT = PACKAGE.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATION = (ROOT / "docs" / "operation.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _shell_texts(page: str) -> Iterator[str]:
    """What a person could type: the prompts of console blocks, and code inside lines."""
    for kind, body in FENCE.findall(page):
        if kind == "console":
            yield from (line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ "))
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", page))


def _commands(page: str) -> Iterator[list[str]]:
    """Arguments of each call of transom in a page."""
    for text in _shell_texts(page):
        inner = re.fullmatch(r'eval "\$\((.*)\)"', text)
        words = shlex.split(inner[1] if inner else text, comments=True)
        calls = [at for at, word in enumerate(words) if word == "transom"]
        if calls and (calls[0] == 0 or words[0] == "sbatch"):
            yield from (words[begin + 1 :] for begin in calls)  # one may stand inside another: transom lab exec


def _check(arguments: list[str]) -> None:
    """Raise where the command line would not understand it; nothing is run."""
    command: click.Command = transom
    context = click.Context(command, info_name="transom")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        found = command.get_command(context, arguments[0])
        assert found is not None, f"there is no command {arguments[0]!r}"
        command, arguments = found, arguments[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    if arguments:  # a command that is only named needs no arguments
        try:
            command.make_context(command.name, arguments, parent=context.parent)
        except click.exceptions.Exit:
            pass  # --help
        if isinstance(command, click.Group):
            assert all(argument.startswith("-") for argument in arguments)


CALLS = [(page.name, call) for page in PAGES for call in _commands(page.read_text())]


def test_there_are_commands() -> None:
    assert len(CALLS) > 30
    assert {call[0] for _, call in CALLS if call} >= {"submit", "render", "status", "launch", "drill", "lab"}


@pytest.mark.parametrize(("page", "call"), CALLS, ids=[f"{page}: {shlex.join(call)}" for page, call in CALLS])
def test_commands_are_understood(page: str, call: list[str]) -> None:  # noqa: ARG001 (for the name of the test)
    _check(list(call))


@pytest.mark.parametrize("call", [["submit", "--nodez", "2", "--", "x"], ["sbmit"], ["lab", "crush"], ["lab", "--x"]])
def test_wrong_commands_are_not(call: list[str]) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        _check(call)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    folders = "tests|examples|scripts|benchmarks|sbatch_templates|site_configs|docs|transom_hpc|ckpt|monitors"
    for name in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/]+(?:\.\w+)?)", text):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name
    for folder, name in re.findall(r"`(tol|slurm|base)/(\w+)`", text):
        assert (PACKAGE / folder / f"{name}.py").exists(), f"{folder}/{name}"


def test_every_site_key_is_explained() -> None:
    table = OPERATION.partition("## Site configs")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(key.name for key in fields(SiteConfig))


def test_every_public_name_is_mentioned() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in transom_hpc.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_causes_and_budgets() -> None:
    table = OPERATION.partition("## Causes and budgets")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Za-z ]+) \| (\d+) \|", table, re.MULTILINE)
    assert {Cause(name): int(limit) for name, limit in rows} == {
        cause: budget.restarts for cause, budget in BUDGETS.items()
    }


def test_the_state_machine_is_drawn_as_it_is() -> None:
    page = ROOT / "docs" / "architecture.md"
    assert put_into(page.read_text()) == page.read_text(), f"python -m transom_hpc.tol.drawing {page}"


def _kinds() -> set[str]:
    """The kinds of journal entries that the code writes: first arguments of `record`, `_record` and `Record`."""
    found = set()
    for path in (PACKAGE / "tol").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("record", "_record", "Record"):
                    found.add(node.args[0].value)
    return found


def test_every_journal_kind_is_explained() -> None:
    table = ARCHITECTURE.partition("## The journal")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z -]+)` \|", table, re.MULTILINE)) == _kinds()


def _place(module: str) -> str | None:
    """The folder of the package that a module is in; `top` for those in none."""
    parts = module.split(".")
    if parts[0] != "transom_hpc" or len(parts) < 2:
        return None
    if (PACKAGE / parts[1]).is_dir():
        return parts[1]
    return "top" if (PACKAGE / f"{parts[1]}.py").exists() else None


def _arrows() -> set[tuple[str, str]]:
    found = set()
    places = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    files = [(place.name, path) for place in places for path in place.glob("*.py")]
    files += [("top", path) for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    for here, path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {(here, there) for module in modules if (there := _place(module)) and there != here}
    return found


def test_the_drawing_of_the_house_is_true() -> None:
    drawing = ARCHITECTURE.partition("flowchart TD")[2].partition("```")[0]
    assert set(re.findall(r"(\w+) --> (\w+)", drawing)) == _arrows()


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    picture = (ROOT / "docs" / "status.svg").read_text()
    ElementTree.fromstring(picture)
    assert "url(http" not in picture
    assert "Restarts" in picture
