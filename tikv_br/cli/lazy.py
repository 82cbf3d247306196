"""Command groups that import a command's module only when that command runs: ``--help`` stays quick."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Command, Context
    from typer._click.shell_completion import CompletionItem


CommandPath = tuple[str, ...]
"""The words that call a command, without the program's name."""
_COMPLETION = ("install_completion", "show_completion")  # the root offers them; once is enough


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is not imported yet: ``module`` holds its Typer ``app``, ``help`` stands in the list."""

    module: str
    help: str

    def load(self, name: str) -> Command:
        """Import the module and build its command."""
        app: typer.Typer = importlib.import_module(self.module).app
        command = typer.main.get_command(app)
        command.name = name
        command.params = [param for param in command.params if param.name not in _COMPLETION]
        return command


class LazyGroup(TyperGroup):
    """A group whose commands stand in `table`; a subclass fills it."""

    table: ClassVar[dict[str, LazyCommand]]

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - handed through to Typer
        super().__init__(**attributes)
        for name, lazy in self.table.items():
            self.add_command(TyperCommand(name=name, help=lazy.help), name)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Find the command by its stand-in (with suggestions for typing errors), then import the real one."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name in self.table else command, rest

    def load(self, name: str) -> Command:
        """Import a command of the table; a subclass may add to it what all commands take."""
        return self.table[name].load(name)


class DefaultCommandGroup(TyperGroup):
    """A group that runs ``raw`` where no command is named: ``restore -s URL`` is ``restore raw -s URL``."""

    default_command: ClassVar[str] = "raw"

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Put the default command in front unless one is named or only help is wanted."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Offer the default command's flags too, as it need not be named."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        default = self.commands[self.default_command]
        inner = typer.Context(default, parent=ctx, info_name=self.default_command)
        own = {item.value for item in found}
        return found + [item for item in default.shell_complete(inner, incomplete) if item.value not in own]


def leaves(
    command: Command, path: CommandPath = (), words: Collection[str] | None = None
) -> Iterator[tuple[CommandPath, Command]]:
    """Yield the commands that do something at and below one, with the words that call them. Imports them.

    ``words`` limits them to those that begin with one.
    """
    if not isinstance(command, TyperGroup):
        yield path, command
        return
    for name, inner in command.commands.items():
        if words is None or name in words:
            real = command.load(name) if isinstance(command, LazyGroup) else inner
            yield from leaves(real, (*path, name))
