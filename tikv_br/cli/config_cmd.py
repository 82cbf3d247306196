"""``tikv-br config``: which settings hold, and where they come from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperOption

from tikv_br.cli.common import Invocation, file_defaults
from tikv_br.cli.lazy import CommandPath, leaves
from tikv_br.cli.options import OutputForm, OutputOption
from tikv_br.cli.output import Output
from tikv_br.cli.settings import ConfigFile, nearest, options
from tikv_br.errors import UsageError
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from typer._click import Command

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting of a command as it holds: its value with secrets masked, and where it comes from."""

    command: str
    name: str
    value: object
    origin: str
    """``flag``, ``env NAME``, ``file PATH [section]`` or ``default``."""


@app.callback()
def group() -> None:
    """Show which settings hold and where they come from, and check the config file."""


def _complete_command(context: typer.Context) -> list[str]:
    """The words that a command can go on with, for the shell."""
    said = tuple(context.params.get("command") or ())
    paths = [path for path, _ in leaves(context.find_root().command) if path[: len(said)] == said != path]
    return list(dict.fromkeys(path[len(said)] for path in paths))


@app.command("show", context_settings={"ignore_unknown_options": True})
def show(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND] [FLAGS]",
            help="A command, and flags to try with it; without, all commands.",
            autocompletion=_complete_command,
        ),
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Show the settings of a command; without one, what file and environment set for any."""
    commands = dict(leaves(context.find_root().command))
    path, flags = _split(command or [], commands)
    if path is None:
        found = [each for path in commands for each in _effective(context, path, commands[path], [])]
        found = [each for each in found if each.origin != "default"]
    else:
        found = list(_effective(context, path, commands[path], flags))
    out = Output(output)
    for each in found:
        fields = {"command": each.command, "name": each.name, "value": each.value, "origin": each.origin}
        out.result("setting", fields)
    rows = [(each.command, each.name, _text(each.value), each.origin) for each in found]
    columns = ("command", "name", "value", "origin")
    shown = [0, 1, 2, 3] if path is None else [1, 2, 3]
    shown = shown if origin else shown[:-1]
    out.table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


@app.command("check")
def check(context: typer.Context, output: OutputOption = OutputForm.CONSOLE) -> None:
    """Look for mistakes in the config file and in the TIKV_BR_… variables; exit code 2 when there are any."""
    commands = dict(leaves(context.find_root().command))
    file = _file(context)
    problems = [*(file.problems if file is not None else ()), *_wrong_variables(context, commands)]
    out = Output(output)
    for problem in problems:
        out.result("problem", {"message": redact(problem)}, redact(problem))
    if problems:
        raise UsageError(f"{len(problems)} mistakes in the settings", hint="See docs/configuration.md.")
    keys = sum(len(values) for values in file.sections.values()) if file is not None else 0
    place = str(file.path) if file is not None else ""
    text = f"{place}: {keys} settings, all right" if place else "no config file; the variables are right"
    out.result("config", {"file": place, "settings": keys}, text)


def _split(words: Sequence[str], commands: dict[CommandPath, Command]) -> tuple[CommandPath | None, list[str]]:
    """The command that the words begin with, and the flags after it. Raises `UsageError` where there is none."""
    if not words:
        return None, []
    for length in range(len(words), 0, -1):
        if tuple(words[:length]) in commands:
            return tuple(words[:length]), list(words[length:])
    if (*words[:1], "raw") in commands:  # `restore` is `restore raw`
        return (words[0], "raw"), list(words[1:])
    known = [" ".join(path) for path in commands]
    raise UsageError(f"no command {' '.join(words)!r}{nearest(' '.join(words), known)}", hint="See `tikv-br --help`.")


def _effective(context: typer.Context, path: CommandPath, command: Command, flags: list[str]) -> Iterator[Effective]:
    """Yield the settings of a command as they would hold. Raises what a wrong flag raises."""
    file = _file(context)
    inner = typer.Context(command, parent=context, info_name=path[-1])
    inner.default_map = {} if file is None else file_defaults(file, path, command)
    given, _, _ = command.make_parser(inner).parse_args(list(flags))
    sections = {} if file is None else file.of(path, command)
    for flag, option in options(command).items():
        value, source = option.consume_value(inner, given)
        origin = {
            "COMMANDLINE": "flag",
            "ENVIRONMENT": f"env {option.envvar}",
            "DEFAULT_MAP": f"file {file.path if file else ''} [{sections[flag].section if flag in sections else ''}]",
        }.get(source.name, "default")
        yield Effective(" ".join(path), flag, _shown(flag, value), origin)


def _file(context: typer.Context) -> ConfigFile | None:
    invocation = context.find_object(Invocation)
    return None if invocation is None else invocation.file


def _shown(flag: str, value: object) -> object:
    """A value as JSON has it, without its secrets."""
    if isinstance(value, list | tuple):
        return [_shown(flag, each) for each in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    return redact(f"{flag}={value}").removeprefix(f"{flag}=")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _wrong_variables(context: typer.Context, commands: dict[CommandPath, Command]) -> Iterator[str]:
    """Yield what is wrong with each variable that begins like ours."""
    takers: dict[str, list[TyperOption]] = {}
    for command in commands.values():
        for option in command.params:
            if isinstance(option, TyperOption) and isinstance(option.envvar, str):
                takers.setdefault(option.envvar, []).append(option)
    for name, value in sorted(os.environ.items()):
        if not name.startswith("TIKV_BR_") or not value:
            continue
        if name not in takers:
            yield f"environment: {name} is no setting{nearest(name, takers)}"
        for option in takers.get(name, [])[:1]:
            try:
                option.get_runtime_param().coerce(option.value_from_envvar(context), option, context)
            except typer.BadParameter as error:
                yield f"environment: {name}={value!r}: {error.message}"
