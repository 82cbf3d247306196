"""The documentation site as readers meet it: built by MkDocs, and read as HTML; and the form of its sources."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.support.tools import ROOT

DOCS = ROOT / "docs"
GENERATED = {"cli-json.md", "exit-codes.md"}
"""Tables made by scripts/generate_*.py: they are looked up, not read."""
LONGEST_LINE = 200
MOST_WORDS = 45_000
"""Maximum number of words of guides and reference, with examples."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_no_cell_has_a_backslash_before_a_pipe(site: Path) -> None:
    """GitHub needs it in code within a table; the site would show it."""
    found = {page.parent.name for page in site.rglob("*.html") if "\\|" in page.read_text(encoding="utf-8")}
    assert found == set()
    options = (site / "backup/index.html").read_text(encoding="utf-8")
    assert "--engine auto|store|scan" in options


def copied(page: Path) -> list[str]:
    """Text that the copy buttons of a page give."""
    return [html.unescape(each) for each in re.findall(r'data-copy="([^"]*)"', page.read_text(encoding="utf-8"))]


def test_copy_gives_commands_without_prompt_and_output(site: Path) -> None:
    """Only the typed commands of a session are copied, with continuation lines."""
    sessions = copied(site / "tutorial/index.html")
    assert "tikv-br raw get --pd 127.0.0.1:12379 greeting" in sessions[1].splitlines()[-1]
    assert not [each for each in sessions if "$ " in each or "hello, TiKV\n" in each]
    continued = next(each for each in copied(site / "kubernetes/index.html") if "--health-cmd" in each)
    assert continued.count("\\\n") == 2


def test_the_home_page_has_all_to_begin_with(site: Path) -> None:
    """One sentence, a picture, how to install it, and four commands."""
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "backs up, restores, migrates and replicates TiKV RawKV clusters" in page
    assert re.search(r'<img [^>]*src="images/serve\.png"', page)
    first, second = copied(site / "index.html")
    assert first.startswith("uv tool install")
    assert [each.split()[1] for each in second.splitlines()] == ["playground", "raw", "backup", "verify"]


def test_search_finds_guides_and_neither_decisions_nor_evidence(site: Path) -> None:
    """Words that operators search for are on the page about them."""
    entries = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    assert not [each["location"] for each in entries if each["location"].startswith(("adr/", "evidence/", "man/"))]

    def pages(text: str) -> set[str]:
        return {each["location"].partition("/")[0] for each in entries if text in each["text"]}

    assert "managing-backups" in pages("retention")
    assert "point-in-time" in pages("2 minutes ago")


def paths(entry: object) -> Iterator[str]:
    """The pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from paths(each)


def test_guides_do_not_grow() -> None:
    """Words that an operator may have to read: neither internals and explanation, nor decisions, evidence and generated tables."""
    counted = {"Home", "Tutorial", "Guides", "Reference"}
    entries = [
        (name, entry) for section in load_config(str(ROOT / "mkdocs.yml")).nav or () for name, entry in section.items()
    ]
    assert counted <= {name for name, _ in entries}
    pages = [
        DOCS / path for name, entry in entries if name in counted for path in paths(entry) if path not in GENERATED
    ]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page.is_file()) <= MOST_WORDS


def test_lines_are_short_enough_to_review() -> None:
    """Only lines of text: rows of tables, sessions and headings cannot be wrapped."""
    found = set()
    for page in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in text.splitlines() if not re.match(r"\s*\||#", line)]
        if page.name not in GENERATED and max(map(len, lines)) > LONGEST_LINE:
            found.add(page.relative_to(ROOT).as_posix())
    assert found == set()
