"""``tikv-br help``: the help of a command, or of a topic that several commands have in common."""

from __future__ import annotations

from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from tikv_br.cli import backup_flags, shared
from tikv_br.cli import help as help_text
from tikv_br.cli.command import argument, command
from tikv_br.cli.groups import leaves
from tikv_br.errors import UsageError

STORAGE = f"""Storage of backups, log archives and reports.

URLs: {backup_flags.URLS}. A plain path is a local directory. Parameters of a URL take precedence over options.

Credentials are those of the environment: AWS_… variables, a profile or the role of the machine for S3; AZURE_STORAGE_… variables or the
identity of the machine for Azure; the application default credentials for Google.

Each command that reads or writes storage has these options."""


def complete_words(context: typer.Context) -> list[str]:
    """The words that can follow in the name of a command, for the shell."""
    typed = tuple(context.params.get("words") or context.params.get("command") or ())
    paths = [path for path, _ in leaves(context.find_root().command) if path[: len(typed)] == typed != path]
    return list(dict.fromkeys(path[len(typed)] for path in paths))


class HelpFlags(shared.CommandFlags):
    words: list[str] | None = argument(
        None, "[COMMAND|storage]", "Command or topic (default: all commands).", autocompletion=complete_words
    )


@command("help", example="restore raw")
def show_help(flags: HelpFlags, context: typer.Context) -> None:
    """Show the help of a command, or of a topic such as storage."""
    words = flags.words or []
    text = storage_help(context) if words == ["storage"] else command_context(context, words).get_help()
    flags.out.result("help", {"text": text}, text)


def command_context(running: typer.Context, words: list[str]) -> Any:  # noqa: ANN401 - public Typer has no name for the type
    """A context of the command with this name. Raises `UsageError`, and Typer's error with the nearest name."""
    context: Any = running.find_root()
    for word in words:
        group = context.command
        if not isinstance(group, TyperGroup):
            raise UsageError(
                f"{context.command_path} has no command {word!r}", hint=f"See `{context.command_path} --help`."
            )
        name, found, _ = group.resolve_command(context, [word])  # raises if there is none
        context = typer.Context(cast("TyperCommand", found), parent=context, info_name=name)
    return context


def storage_help(running: typer.Context) -> str:
    """Describe storage URLs and the options of storage with their variables."""
    found = next(each for _, each in leaves(running.find_root().command, words={"list"}))
    context = typer.Context(found, parent=running, info_name="list")
    formatter = context.make_formatter()
    for paragraph in STORAGE.split("\n\n"):
        formatter.write_text(paragraph)
        formatter.write_paragraph()
    shown = help_text.records(found, context, everything=True)
    rows = [(names, text) for title, names, text in shown if title == "Storage"]
    formatter.write_dl(rows)
    return str(formatter.getvalue()).rstrip("\n")
