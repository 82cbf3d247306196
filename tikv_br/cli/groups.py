"""Groups of commands, which are imported only when they run, and the command that a group runs by default."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from tikv_br.cli import help as help_text
from tikv_br.cli.command import LEADING, CommandPath, PlainValues, apps

GLOBAL_FLAGS = ("--output", "--config", "--log-level", "--log-file", "--log-format", "--quiet", "-q")
"""Flags of every command, which may also stand before it; all but the last two take a value."""
_COMPLETION = ("install_completion", "show_completion")  # the root offers them; once is enough


def split_leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags that stand before the command, with their values, and the rest."""
    count = 0
    while count < len(arguments) and arguments[count].split("=")[0] in GLOBAL_FLAGS:
        takes_value = arguments[count] in GLOBAL_FLAGS[:-2]  # `--output=json` has it
        count += 2 if takes_value else 1
    return arguments[:count], arguments[count:]


class Group(PlainValues, TyperGroup):
    """A group of commands."""


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command, or group of commands, of modules that are not imported yet; `help` is its line in the list of commands, below `panel`.

    Without a panel it is not listed.
    """

    modules: tuple[str, ...]
    help: str
    panel: str

    def load(self, name: str) -> TyperCommand | TyperGroup:
        """Import the module and build its command."""
        for each in self.modules:
            importlib.import_module(each)
        app = apps[name]
        names = [each.name for each in app.registered_commands]
        if names != [name]:
            default = DefaultCommandGroup.default_command
            short = f"`tikv-br {name}` with flags is short for `tikv-br {name} {default}`."
            has_default = default in names
            text = f"{self.help}\n\n{short}" if has_default else self.help
            group = DefaultCommandGroup if has_default else Group
            app.callback(cls=group, help=text, no_args_is_help=True)(lambda: None)
        command = cast("TyperCommand | TyperGroup", typer.main.get_command(app))
        command.name = name
        command.params = [param for param in command.params if param.name not in _COMPLETION]
        return command


class LazyGroup(Group):
    """A group that imports the commands of its `table` only when they run, so that ``--help`` is fast."""

    table: ClassVar[dict[str, LazyCommand]]

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - handed through to Typer
        super().__init__(**attributes)
        for name, lazy in self.table.items():
            self.add_command(
                TyperCommand(name=name, help=lazy.help, rich_help_panel=lazy.panel, hidden=not lazy.panel), name
            )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Keep the flags that stand before the command for the command, and note whether all help is asked for."""
        ctx.meta[LEADING], rest = split_leading(help_text.note_all(ctx, args))
        return super().parse_args(ctx, rest)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """List the commands by their groups; with ``--help-all`` also those in groups of commands."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            found = leaves(self, words={name}) if help_text.shows_all(ctx) else [((name,), command)]
            for path, each in found:
                if not each.hidden:
                    rows.setdefault(self.table[name].panel, []).append((" ".join(path), each.get_short_help_str(1000)))
        for panel, commands in rows.items():
            with formatter.section(panel):
                formatter.write_dl(commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        """Find the placeholder of the command (with suggestions for typing errors), then import the command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.table[name].load(name) if name in self.table else command, rest


class DefaultCommandGroup(Group):
    """A group that runs ``raw`` if no command is named: ``restore -s URL`` is ``restore raw -s URL``."""

    default_command: ClassVar[str] = "raw"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Insert the default command unless a command or help is named."""
        wants_own_help = args[:1] and args[0] in ctx.help_option_names and not help_text.shows_all(ctx)
        # A word like the name of a command is a typing error, not the id of a backup: then its suggestion follows.
        is_mistyped = args[:1] and args[0].isalpha() and difflib.get_close_matches(args[0], self.commands)
        if args and args[0] not in self.commands and not wants_own_help and not is_mistyped:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:  # noqa: ANN401
        """Also offer the flags of the default command."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        default = self.commands[self.default_command]
        inner = typer.Context(default, parent=ctx, info_name=self.default_command)
        own = {item.value for item in found}
        return found + [item for item in default.shell_complete(inner, incomplete) if item.value not in own]


def leaves(
    command: object, path: CommandPath = (), words: Collection[str] | None = None
) -> Iterator[tuple[CommandPath, TyperCommand]]:
    """Import and yield the commands at and below `command` that are not groups, with their paths.

    ``words`` limits the first word of the paths.
    """
    if isinstance(command, TyperCommand):
        yield path, command
        return
    for name, inner in cast("TyperGroup", command).commands.items():
        if words is None or name in words:
            real = command.table[name].load(name) if isinstance(command, LazyGroup) else inner
            yield from leaves(real, (*path, name))
