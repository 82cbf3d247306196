"""``tikv-br config``: effective settings and where they come from; ``tikv-br version``.

``tikv-br help``: the help of a command, or of a topic that several commands have in common.
"""

from __future__ import annotations

import enum
import importlib.metadata
import json
import os
import platform
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from tikv_br import __version__
from tikv_br.cli import backup_flags, shared
from tikv_br.cli import help as help_text
from tikv_br.cli.command import CommandPath, argument, command, flag, leaves
from tikv_br.cli.output import picked
from tikv_br.cli.settings import (
    CONFIG_NAME,
    DEFAULTS,
    ConfigFile,
    Invocation,
    is_shared,
    kind_of,
    nearest,
    options,
    probe_context,
    shared_flags,
    variables,
)
from tikv_br.environment import CONFIG, needed_user_folder
from tikv_br.errors import UsageError
from tikv_br.redaction import is_secret, redact

STORAGE = f"""Storage of backups, log archives and reports.

URLs: {backup_flags.URLS}. A plain path is a local directory. Parameters of a URL take precedence over options.

Credentials come from the environment: AWS_… variables, a profile or the role of the machine for S3; AZURE_STORAGE_… variables or the
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


@dataclass(frozen=True, slots=True)
class Effective:
    """The effective value of a setting, with secrets masked, and where it comes from."""

    command: str
    name: str
    value: object
    origin: str
    """``flag``, ``env NAME``, ``file PATH [section]`` or ``default``."""


class ConfigShowFlags(shared.CommandFlags):
    command: list[str] | None = argument(
        None, "[COMMAND] [FLAGS]", "Command, with flags to try (default: all commands).", autocompletion=complete_words
    )
    origin: bool = flag(False, "Show where each value comes from.")


@command("config show", example="backup raw --origin", context_settings={"ignore_unknown_options": True})
def show(asked: ConfigShowFlags, context: typer.Context) -> None:
    """Show the settings of a command. Without a command, show what the config file and the environment set."""
    commands = dict(leaves(context.find_root().command))
    path, flags = _split(asked.command or [], commands)
    if path is None:
        found = [each for path in commands for each in _effective_settings(context, path, commands[path], [])]
        found = [each for each in found if each.origin != "default"]
    else:
        found = list(_effective_settings(context, path, commands[path], flags))
    out = asked.out
    for each in found:
        out.result("setting", picked(each, "command", "name", "value", "origin"))
    rows = [(each.command, each.name, _text(each.value), each.origin) for each in found]
    columns = ("command", "name", "value", "origin")
    shown = [0, 1, 2, 3] if path is None else [1, 2, 3]
    shown = shown if asked.origin else shown[:-1]
    out.table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows], prose=("value",))


@command("config check")
def check(asked: shared.CommandFlags, context: typer.Context) -> None:
    """Check the config file and the TIKV_BR_… variables. Exit code 2 if there are mistakes."""
    commands = dict(leaves(context.find_root().command))
    file = _file(context)
    problems = [*(file.problems if file is not None else ()), *_wrong_variables(context, commands)]
    out = asked.out
    for problem in problems:
        out.result("problem", {"message": redact(problem)}, redact(problem))
    if problems:
        raise UsageError(
            f"{len(problems)} mistake{'s' if len(problems) > 1 else ''} in the settings, shown above",
            hint="Correct the file or the variable. `tikv-br config show COMMAND` lists the settings of a command.",
        )
    keys = sum(len(values) for values in file.sections.values()) if file is not None else 0
    place = str(file.path) if file is not None else ""
    text = f"{place}: {keys} settings, no mistakes" if place else "no config file; no mistakes in the variables"
    out.result("config", {"file": place, "settings": keys}, text)


class InitFlags(shared.CommandFlags):
    file: str = argument("", "[FILE]", "File to write, or - for stdout (default: ~/.config/tikv-br/config.toml).")


@command("config init", example="-")
def init(asked: InitFlags, context: typer.Context) -> None:
    """Write a config file with all settings as comments. Fails if the file exists."""
    text = "\n".join(_template(dict(leaves(context.find_root().command)))) + "\n"
    if asked.file == "-":
        asked.out.result("config_file", {"file": "", "text": text}, text.rstrip("\n"))
        return
    path = Path(asked.file) if asked.file else needed_user_folder(CONFIG) / CONFIG_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists", hint="Pass another FILE, or - to print the text.") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint="Pass another FILE.") from None
    asked.out.result("config_file", {"file": str(path), "text": text}, f"{path} is written: all settings are comments")


def _template(commands: dict[CommandPath, TyperCommand]) -> Iterator[str]:
    """Yield the lines of a config file: what commands share, then what each has of its own; no secrets."""
    yield "# Settings of tikv-br. Remove the # before a setting to use it; the values here are the defaults, or examples."
    yield "# A flag on the command line wins over its environment variable, then come the command's section and [defaults]."
    yield "# Secrets are not allowed here: use environment variables, or settings that name a file."
    yield f"\n[{DEFAULTS}]"
    for name, each in shared_flags(commands).items():
        yield from _commented(name, next((option for option in each if not option.multiple), each[0]))
    for path, leaf in commands.items():
        own = {name: each for name, each in options(leaf).items() if not (is_shared(each) or leaf.hidden)}
        if own:
            yield f"\n[{'.'.join(path)}]"
        for option in dict.fromkeys(own.values()):
            yield from _commented(next(each for each in option.opts if each.startswith("--"))[2:], option)


def _commented(name: str, option: TyperOption) -> Iterator[str]:
    """Yield the help of a setting, and the setting, as comments; nothing for secrets and removed settings."""
    if not option.help or redact(f"{name}=x") != f"{name}=x":
        return
    value: Any = option.default
    kind = kind_of(option)
    hint = option.type_descriptor.annotation
    choices = list(hint) if isinstance(hint, enum.EnumMeta) else typing.get_args(hint) if kind is str else []
    if value is None:
        value = (option.min or 1) if kind in {int, float} else next(iter(choices), kind())
    if kind is str:
        value = str(value)
    yield from textwrap.wrap(option.help, 118, initial_indent="# ", subsequent_indent="# ")
    yield f"# {name} = {json.dumps(list(value) if kind is list else value, ensure_ascii=False)}"


def _split(words: Sequence[str], commands: dict[CommandPath, TyperCommand]) -> tuple[CommandPath | None, list[str]]:
    """Return the command at the start of the words, and the flags after it. Raises `UsageError` if there is no command."""
    if not words:
        return None, []
    for length in range(len(words), 0, -1):
        if tuple(words[:length]) in commands:
            return tuple(words[:length]), list(words[length:])
    if (*words[:1], "raw") in commands:  # `restore` is `restore raw`
        return (words[0], "raw"), list(words[1:])
    known = [" ".join(path) for path in commands]
    raise UsageError(f"no command {' '.join(words)!r}{nearest(' '.join(words), known)}", hint="See `tikv-br --help`.")


def _effective_settings(
    context: typer.Context, path: CommandPath, command: TyperCommand, flags: list[str]
) -> Iterator[Effective]:
    """Yield the settings that a command would have. Raises as parsing its flags does."""
    file = _file(context)
    inner = typer.Context(command, parent=context, info_name=path[-1])
    inner.default_map = {} if file is None else file.defaults(path, command)
    given, _, _ = command.make_parser(inner).parse_args(list(flags))
    sections = {} if file is None else file.of(path, command)
    for option in dict.fromkeys(options(command).values()):
        name = next(each for each in option.opts if each.startswith("--"))[2:]
        value, source = option.consume_value(inner, given)
        section = sections[option.name].section if option.name in sections else ""
        origin = {
            "COMMANDLINE": "flag",
            "ENVIRONMENT": f"env {next((each for each in variables(option) if os.environ.get(each)), '')}",
            "DEFAULT_MAP": f"file {file.path if file else ''} [{section}]",
        }.get(source.name, "default")
        yield Effective(" ".join(path), name, _shown(name, value), origin)


def _file(context: typer.Context) -> ConfigFile | None:
    invocation = context.find_object(Invocation)
    return None if invocation is None else invocation.file


def _shown(flag: str, value: object) -> object:
    """A value as in JSON, with secrets masked."""
    if isinstance(value, list | tuple):
        return [_shown(flag, each) for each in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    setting = str(value).partition("=")[0]
    if (
        re.fullmatch(r"[\w.-]+", setting) and is_secret(setting) and setting != value
    ):  # of Spark: a secret may contain what ends a word
        return f"{setting}=***"
    return redact(f"{flag}={value}").removeprefix(f"{flag}=")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _wrong_variables(context: typer.Context, commands: dict[CommandPath, TyperCommand]) -> Iterator[str]:
    """Yield a message for each wrong ``TIKV_BR_`` variable."""
    from tikv_br.incremental.kafka.url import PASSWORD_VARIABLE, USER_VARIABLE

    takers: dict[str, TyperOption] = {}
    for leaf in commands.values():
        for option in leaf.params:
            if isinstance(option, TyperOption):
                takers |= dict.fromkeys(variables(option), option)
    for name, value in sorted(os.environ.items()):
        if not name.startswith("TIKV_BR_") or name in {USER_VARIABLE, PASSWORD_VARIABLE} or not value:
            continue
        if name not in takers:
            yield f"environment: {name} is not a setting{nearest(name, takers)}"
            continue
        try:
            option = takers[name]
            option.process_value(probe_context(context), option.value_from_envvar(context))
        except typer.BadParameter as error:
            yield f"environment: {name}={value!r}: {error.message}"


DEPENDENCIES = ("pyspark", "pyarrow", "grpcio", "obstore", "boto3", "numba")


@command("version")
def version(asked: shared.CommandFlags) -> None:
    """Show the versions of tikv-br and of its main dependencies."""
    versions = {"tikv-br": __version__, "python": platform.python_version()}
    for name in DEPENDENCIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # of tikv-br-core
            versions[name] = "not installed"
    asked.out.result("version", {"versions": versions})
    asked.out.table(("package", "version"), list(versions.items()))
