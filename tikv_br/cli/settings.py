"""The config file: found, read, and checked against the flags of all commands before any of it counts.

``[defaults]`` takes the flags that commands share, ``[backup.raw]`` those of that command; keys are the flags' names. A flag on the
command line goes before its environment variable, that before the command's section, that before ``[defaults]``.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup, TyperOption

from tikv_br.cli.lazy import CommandPath, leaves
from tikv_br.errors import UsageError
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from typer._click import Command, Context

DEFAULTS = "defaults"
FLAGS_ONLY = frozenset(
    {
        "allow-overwrite",
        "config",
        "confirm",
        "force",
        "help",
        "install-completion",
        "repair",
        "repair-delete",
        "show-completion",
        "version",
        "yes",
    }
)
"""Flags that are said anew each time: what they confirm or choose must not lie in wait in a file or a variable."""
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list of strings",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the file and the section it stands in."""

    value: Any
    section: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file: its settings by section (``defaults``, ``backup.raw``) and flag, and what is wrong with it."""

    path: Path
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def of(self, path: CommandPath, command: Command) -> dict[str, Setting]:
        """What the file says for a command, by flag."""
        own, flags = ".".join(path), options(command)
        shared = {flag: value for flag, value in self.sections.get(DEFAULTS, {}).items() if is_shared(flags.get(flag))}
        return {flag: Setting(value, DEFAULTS) for flag, value in shared.items()} | {
            flag: Setting(value, own) for flag, value in self.sections.get(own, {}).items()
        }


def locate(named: str | None) -> Path | None:
    """The file that counts: the named one, else the user's own if there is one."""
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(home, "tikv-br", "config.toml")
    return path if path.is_file() else None


def load(path: Path, context: Context, word: str | None = None) -> ConfigFile:
    """Read a file and compare it with the commands: all, or those it speaks of and those that begin with ``word``.

    Raises `UsageError` where it cannot be read or is no TOML.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror or error}", hint="See --config.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path}: {error}", hint="See docs/configuration.md.") from None
    root, defaults = context.find_root().command, document.get(DEFAULTS)
    commands = dict(leaves(root, words=None if word is None else {word, *document}))
    flags = dict(_flatten(defaults)) if isinstance(defaults, dict) else {}
    if not flags.keys() <= _shared(commands).keys():  # each command costs an import: only then all of them
        commands = dict(leaves(root))
    checker = _Checker(ConfigFile(path), commands, context)
    checker.group(document, ())
    return checker.file


def options(command: Command) -> dict[str, TyperOption]:
    """The flags of a command that file and environment may set, by their names without dashes."""
    named = {_flag(param): param for param in command.params if isinstance(param, TyperOption)}
    return {flag: option for flag, option in named.items() if flag not in FLAGS_ONLY}


def variable(path: CommandPath, flag: str) -> str:
    """The environment variable of a flag: of one that is shared (no path), or of one command's."""
    return "_".join(["TIKV_BR", *path, flag]).upper().replace("-", "_").replace(".", "_")


def is_shared(option: TyperOption | None) -> bool:
    """Whether commands share a flag: its variable does not name one of them."""
    return option is not None and option.envvar == variable((), _flag(option))


def nearest(word: str, known: Iterable[str]) -> str:
    """A question that ends a complaint about ``word``; empty where nothing is like it."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _shared(commands: Mapping[CommandPath, Command]) -> dict[str, list[TyperOption]]:
    """The flags that commands share, as each of them has it."""
    found: dict[str, list[TyperOption]] = {}
    for command in commands.values():
        for flag, option in options(command).items():
            if is_shared(option):
                found.setdefault(flag, []).append(option)
    return found


class _Checker:
    """Takes a document apart into the sections of a `ConfigFile`, and notes what does not fit."""

    def __init__(self, file: ConfigFile, commands: Mapping[CommandPath, Command], context: Context) -> None:
        self.file, self._commands, self._context = file, commands, context
        root = context.find_root().command
        self._names = root.commands if isinstance(root, TyperGroup) else {}

    def group(self, tables: Mapping[str, Any], path: CommandPath) -> None:
        """Look at what stands at the top, or below a word that commands begin with."""
        known = {command[len(path)] for command in self._commands if command[: len(path)] == path}
        known |= set() if path else set(self._names)
        for name, content in tables.items():
            inner = (*path, name)
            if name not in known and inner != (DEFAULTS,):
                what = "section" if isinstance(content, dict) else "key outside of a section"
                full = [".".join((*path, word)) for word in (known if path else known | {DEFAULTS})]
                self._note(path, f"unknown {what} {'.'.join(inner)!r}{nearest('.'.join(inner), full)}")
            elif not isinstance(content, dict):
                self._note(path, f"{name!r} is a section: write [{'.'.join(inner)}]")
            elif inner == (DEFAULTS,):
                self._section(inner, content, _shared(self._commands))
            elif inner in self._commands:
                flags = options(self._commands[inner])
                self._section(inner, content, {flag: [option] for flag, option in flags.items()})
            else:
                self.group(content, inner)

    def _section(
        self, path: CommandPath, content: Mapping[str, Any], flags: Mapping[str, Sequence[TyperOption]]
    ) -> None:
        values = self.file.sections[".".join(path)] = dict(_flatten(content))
        for flag, value in values.items():
            if flag in FLAGS_ONLY:
                self._note(path, f"{flag}: only on the command line")
            elif flag not in flags:
                self._note(path, f"unknown key {flag!r}{nearest(flag, flags)}")
            elif redact(f"{flag}={value}") != f"{flag}={value}":
                self._note(
                    path, f"{flag}: no secrets in this file; use {flags[flag][0].envvar}, or a key that names a file"
                )
            else:
                problems = [_problem(option, value, self._context) for option in flags[flag]]
                if any(problems):
                    self._note(path, f"{flag}: {next(filter(None, problems))}")

    def _note(self, path: CommandPath, problem: str) -> None:
        section = f" [{'.'.join(path)}]" if path else ""
        self.file.problems.append(f"config file {self.file.path}{section}: {problem}")


def _flag(param: TyperOption) -> str:
    return next(each for each in param.opts if each.startswith("--")).lstrip("-")


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``s3.endpoint`` is a flag's name, and to TOML a table in a table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _problem(option: TyperOption, value: object, context: Context) -> str:
    """What is wrong with a value; empty where nothing is."""
    kind = _kind(option)
    fits = type(value) in {kind, int if kind is float else kind}
    if kind is list:
        fits = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if not fits:
        return f"{value!r} is not {_TYPE_NAMES[kind]}"
    try:
        option.get_runtime_param().coerce(
            [value] if kind is list and isinstance(value, str) else value, option, context
        )
    except typer.BadParameter as error:
        return f"{value!r}: {error.message}"
    return ""


def _kind(option: TyperOption) -> type:
    """The TOML type that a flag takes. Durations, sizes and whatever else a parser reads are strings."""
    if option.multiple:
        return list
    annotation = option.type_descriptor.annotation
    is_plain = option.type_descriptor.parameter_info.parser is None
    return annotation if is_plain and annotation in {bool, int, float} else str
