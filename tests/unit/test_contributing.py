"""What CONTRIBUTING.md and SECURITY.md name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.tools import ROOT

MOST_FILES = 20
WALKS = ("A key", "A change", "A limit", "A command", "A flag", "A test")


def files_of(walk: str) -> list[str]:
    """Return the files that a walk names, in order."""
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition(f"**{walk}**")
    steps, _, _ = rest.partition("**")
    return re.findall(r"`([\w/]+\.(?:py|md))`", steps)


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_existing_files_once(walk: str) -> None:
    """A file that was moved or removed is noticed, and a walk stays short enough to be read."""
    files = files_of(walk)
    assert 3 < len(files) <= MOST_FILES
    assert len(files) == len(set(files))
    assert [name for name in files if not (ROOT / name).is_file()] == []


PACKAGES = [path for top in ("tikv_br", "formats", "incremental") for path in sorted((ROOT / top).rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_reading_list_has_the_modules_of_its_package(package: Path) -> None:
    """No module is missing in it, and none that is gone is listed. Errors are all in one module; generated code has no list."""
    if package.parent.name in {"errors", "pb"} or package.parent == ROOT / "tikv_br":
        return
    doc = ast.get_docstring(ast.parse(package.read_text())) or ""
    modules = {path.stem for path in package.parent.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in package.parent.glob("*/__init__.py")}
    listed = {name for line in re.findall(r"^- ([`\w, ]+):", doc, re.MULTILINE) for name in re.findall(r"\w+", line)}
    assert modules | folders <= set(re.findall(r"\w+", doc))
    assert listed <= modules | folders


def test_files_that_pages_name_are_there() -> None:
    """In guides and in CONTRIBUTING.md, by the end of their path. Decisions and recorded runs keep the names of their time."""
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    gone = [
        f"{page.name}: {name}"
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert gone == []
