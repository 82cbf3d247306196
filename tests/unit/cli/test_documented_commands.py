"""Each command that a document or a hint shows is one, with flags that it has."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from tikv_br.cli.command import leaves
from tikv_br.cli.main import app

PROJECT = Path(__file__).resolve().parents[3]
PAGES = [
    PROJECT / "README.md",
    PROJECT / "SECURITY.md",
    PROJECT / "CHANGELOG.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
]
SOURCES = [
    each
    for package in ("tikv_br", "incremental")
    for each in sorted((PROJECT / package).rglob("*.py"))
    if "`tikv-br " in each.read_text(encoding="utf-8")
]
COMMANDS = dict(leaves(typer.main.get_command(app)))
GROUPS = {path[0] for path in COMMANDS if len(path) > 1}
FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9.-]*[a-z0-9]")
NAMES = {"key", "record", "backupmeta"}
"""Words behind `tikv-br` where it is a key that is derived (docs/backup-set.md), and no command."""
GROUPS_OF_FLAGS = {"--crypter"}
"""Beginnings of flags that hints name."""
EVERYWHERE = {"--help", "--help-all", "--version", "--install-completion", "--show-completion"}


def shown(text: str) -> Iterator[str]:
    """Return the text after ``tikv-br`` in code lines and inline code, up to the end of the command."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind in {"", "console", "crontab"}:
            yield from re.findall(r"\btikv-br +([a-z][^#|;&\n]*)", block.replace("\\\n", " "))
    for code in re.findall(r"`([^`\n]+)`", text):
        yield from (each for each in re.findall(r"^tikv-br +([a-z][^;&]*)", code) if each.split()[0] not in NAMES)


def flags_of(words: list[str]) -> set[str] | None:
    """All flags of the commands that these words begin with; None where there is no such command."""
    several = [set(word.split("|")) for word in words[:2]]
    found = [
        command
        for path, command in COMMANDS.items()
        if path[0] in several[0]
        and (len(path) == 1 or len(several) < 2 or path[1] in several[1] or not is_name(words[1]))
    ]
    return (
        {flag for command in found for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        if found
        else None
    )


def is_name(word: str) -> bool:
    """Whether it could be the second word of a command's name."""
    return re.fullmatch(r"[a-z|-]+", word) is not None and not word.startswith("-")


@pytest.mark.parametrize("page", PAGES + SOURCES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    """A flag that was renamed, or a command that is gone, is shown nowhere: neither on a page nor by a hint."""
    for command in shown(page.read_text(encoding="utf-8")):
        known = flags_of(command.split())
        assert known is not None, f"there is no command: tikv-br {command}"
        odd = set(FLAG.findall(command)) - known - EVERYWHERE
        assert not odd, f"tikv-br {command}: {', '.join(sorted(odd))}"


def hints() -> Iterator[tuple[str, str]]:
    """The texts of all hints in the source, with the file."""
    for package in ("tikv_br", "incremental"):
        for source in sorted((PROJECT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
                value = node.value if isinstance(node, ast.keyword) and node.arg == "hint" else None
                if isinstance(node, ast.Assign) and any(
                    getattr(each, "attr", getattr(each, "id", "")).lower().endswith("hint") for each in node.targets
                ):
                    value = node.value
                for each in ast.walk(value) if value is not None else ():
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield source.name, each.value


def test_flags_of_hints_exist() -> None:
    """A flag that a hint names alone, without its command, is one of some command."""
    known = {flag for command in COMMANDS.values() for param in command.params for flag in param.opts}
    known |= {flag for command in COMMANDS.values() for param in command.params for flag in param.secondary_opts}
    found = [(source, flag) for source, text in hints() for flag in FLAG.findall(text)]
    assert len(found) > 100
    assert {each for each in found if each[1] not in known | EVERYWHERE | GROUPS_OF_FLAGS} == set()


def test_examples_parse() -> None:
    """Each command has an example in its help, and accepts it."""
    for path, command in COMMANDS.items():
        words = shlex.split(str(command.epilog).splitlines()[-1])
        assert words[: 1 + len(path)] == ["tikv-br", *path]
        command.make_context(" ".join(path), words[1 + len(path) :])


def test_commands_and_flags_are_found() -> None:
    """The pages show most commands and flags: otherwise nothing would have been compared."""
    commands = [command for page in PAGES for command in shown(page.read_text(encoding="utf-8"))]
    assert len({command.split()[0] for command in commands} & {path[0] for path in COMMANDS}) > 12
    assert len({flag for command in commands for flag in FLAG.findall(command)}) > 60
