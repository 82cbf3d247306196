#!/usr/bin/env python3
"""Write a man page for each command, and one for all: ``generate_man.py DIR``. They have the text of ``--help-all``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
import typer.main
from typer.core import TyperCommand

from tikv_br import __version__
from tikv_br.cli import help as help_text
from tikv_br.cli.command import leaves
from tikv_br.cli.main import PROGRAM, Commands, app


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page."""
    root = typer.main.get_command(app)
    commands = [(path, command) for path, command in leaves(root) if not command.hidden]
    yield f"{PROGRAM}.1", "\n".join(_overview(str(root.help), [(path[0], path, each) for path, each in commands]))
    for path, command in commands:
        yield f"{'-'.join((PROGRAM, *path))}.1", "\n".join(_page(path, command))


def _overview(text: str, commands: list[tuple[str, tuple[str, ...], TyperCommand]]) -> Iterator[str]:
    yield from _head(PROGRAM, text, f"{PROGRAM} COMMAND [OPTIONS]")
    for panel in dict.fromkeys(lazy.panel for lazy in Commands.table.values()):
        yield f".SH {panel.upper()}"
        for first, path, command in commands:
            if Commands.table[first].panel == panel:
                yield f".TP\n.BR {_escaped('-'.join((PROGRAM, *path)))} (1)\n{_line(command.get_short_help_str(1000))}"


def _page(path: tuple[str, ...], command: TyperCommand) -> Iterator[str]:
    context = typer.Context(command, info_name=f"{PROGRAM} {' '.join(path)}")
    usage = f"{context.info_name} {' '.join(command.collect_usage_pieces(context))}"
    yield from _head("-".join((PROGRAM, *path)), command.help or "", usage)
    found = list(help_text.records(command, context, everything=True))
    for panel in help_text.PANELS:
        rows = [(names, text) for title, names, text in found if title == panel]
        if rows:
            yield f".SH {panel.upper()}"
        for names, text in rows:
            yield f".TP\n.B {_line(names)}\n{_line(text)}"
    if command.epilog:
        yield f".SH EXAMPLE\n.nf\n{_line(str(command.epilog).splitlines()[-1].strip())}\n.fi"
    yield f".SH SEE ALSO\n.BR {_escaped(PROGRAM)} (1)\n"


def _head(name: str, text: str, usage: str) -> Iterator[str]:
    paragraphs = [" ".join(each.split()) for each in text.replace("\b\n", "").split("\n\n")]
    yield f'.TH "{name.upper()}" 1 "" "{PROGRAM} {__version__}"'
    yield f".SH NAME\n{_escaped(name)} \\- {_line(paragraphs[0].split('. ')[0].rstrip('.'))}"
    yield f".SH SYNOPSIS\n.B {_line(usage)}"
    yield ".SH DESCRIPTION\n" + "\n.PP\n".join(_line(each) for each in paragraphs)


def _line(text: str) -> str:
    """Text as one line of a page that groff does not take for a request."""
    return re.sub(r"^([.'])", r"\\&\1", _escaped(" ".join(text.split())))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def main() -> None:
    """Write the pages."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIR")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
