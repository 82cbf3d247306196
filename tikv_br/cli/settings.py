"""The config file: read, and checked against the flags of all commands before a command uses it.

``[defaults]`` takes the flags that commands share, ``[backup.raw]`` the flags of that command; keys are the names of flags. A flag on the
command line takes precedence over its environment variable, then come the command's section and ``[defaults]``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from msgspec import Struct, field
from typer.core import TyperCommand, TyperGroup, TyperOption

from tikv_br.cli.command import CommandPath, leaves, variable
from tikv_br.environment import CONFIG, user_folder
from tikv_br.errors import UsageError
from tikv_br.redaction import redact
from tikv_br.storage.url import expand_home

DEFAULTS = "defaults"
CONFIG_NAME = "config.toml"
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list of strings",
}


CHECK: CommandPath = ("config", "check")
"""The command that reports mistakes in the config file instead of failing with them."""


class Invocation(Struct):
    """Properties of the command line known before the command starts; the context's ``obj``."""

    file: ConfigFile | None = None
    output: str = ""
    """The output format that the config file asks for."""
    has_secrets: bool = False
    """Whether a credential is on the command line."""
    ignored: Sequence[str] = ()
    """Messages about environment variables that were ignored."""


class Setting(Struct, frozen=True):
    """A value of the file, and its section."""

    value: Any
    section: str


class ConfigFile(Struct, frozen=True):
    """A file: its settings by section (``defaults``, ``backup.raw``) and flag, and its mistakes."""

    path: Path
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def of(self, path: CommandPath, command: TyperCommand) -> dict[str, Setting]:
        """The settings of a command, by the names of its parameters."""
        own, flags = ".".join(path), options(command)
        shared = {flag: value for flag, value in self.sections.get(DEFAULTS, {}).items() if is_shared(flags.get(flag))}
        settings = {flag: Setting(value, DEFAULTS) for flag, value in shared.items()} | {
            flag: Setting(value, own) for flag, value in self.sections.get(own, {}).items()
        }
        return {str(flags[flag].name): setting for flag, setting in settings.items()}

    def defaults(self, path: CommandPath, command: Any) -> dict[str, Any]:  # noqa: ANN401 - public Typer has no type
        """The settings of a command as a ``default_map``."""
        lists = {option.name for option in options(command).values() if option.multiple}
        return {
            name: [setting.value] if name in lists and isinstance(setting.value, str) else setting.value
            for name, setting in self.of(path, command).items()
        }


def use_config(context: typer.Context, named: str | None) -> str | None:
    """Take the defaults of the running command from the config file. Raises `UsageError`."""
    place, path = locate(named), tuple(context.command_path.split()[1:])
    if place is None:
        return named
    file = load(place, context, None if path == CHECK else path[0])
    if file.problems and path != CHECK:
        raise UsageError(
            "; ".join(file.problems), hint=f"`tikv-br {' '.join(CHECK)}` also checks environment variables."
        )
    context.default_map = file.defaults(path, context.command)
    invocation = context.find_object(Invocation)
    if invocation is not None:
        invocation.file = file
        invocation.output = str(context.default_map.get("output", ""))
    return named


def locate(named: str | None) -> Path | None:
    """The named file, else the user's own if it exists."""
    if named:
        return Path(expand_home(named))
    folder = user_folder(CONFIG)
    if folder is None:
        return None
    path = folder / CONFIG_NAME
    return path if path.is_file() else None


def load(path: Path, context: typer.Context, word: str | None = None) -> ConfigFile:
    """Read a file and check it against all commands, or against those that it names and those below ``word``.

    Raises `UsageError` if it cannot be read or is not TOML.
    """
    import tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror or error}", hint="Check --config.") from None
    except UnicodeDecodeError:
        raise UsageError(f"config file {path} is not in UTF-8", hint="Save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"config file {path}: {error}", hint="See docs/configuration.md.") from None
    root, defaults = context.find_root().command, document.get(DEFAULTS)
    commands = dict(leaves(root, words=None if word is None else {word, *document}))
    flags = dict(_flatten(defaults)) if isinstance(defaults, dict) else {}
    if not flags.keys() <= shared_flags(commands).keys():  # each command costs an import: only then all of them
        commands = dict(leaves(root))
    checker = _Checker(ConfigFile(path), commands, context)
    checker.group(document, ())
    return checker.file


def options(command: TyperCommand) -> dict[str, TyperOption]:
    """The flags of a command that file and environment may set, by each of their names without dashes."""
    return {name: option for name, option in _options_by_name(command).items() if option.envvar and name != "config"}


def variables(option: TyperOption) -> list[str]:
    """The environment variables of a flag."""
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


def is_shared(option: TyperOption | None) -> bool:
    """Whether commands share a flag: its variable does not name one of them."""
    return option is not None and variables(option)[:1] == [variable((), _names(option)[0])]


def _options_by_name(command: TyperCommand) -> dict[str, TyperOption]:
    return {name: param for param in command.params if isinstance(param, TyperOption) for name in _names(param)}


def _names(option: TyperOption) -> list[str]:
    return [each[2:] for each in option.opts if each.startswith("--")]


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``word``: the most similar known one, if any."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def shared_flags(commands: Mapping[CommandPath, TyperCommand]) -> dict[str, list[TyperOption]]:
    """The flags that commands share, as each of them has it."""
    found: dict[str, list[TyperOption]] = {}
    for command in commands.values():
        for flag, option in options(command).items():
            if is_shared(option):
                found.setdefault(flag, []).append(option)
    return found


class _Checker:
    """Fills the sections of a `ConfigFile` from a TOML document, and collects its mistakes."""

    def __init__(self, file: ConfigFile, commands: Mapping[CommandPath, TyperCommand], context: typer.Context) -> None:
        self.file, self._commands, self._context = file, commands, context
        root = context.find_root().command
        self._names = root.commands if isinstance(root, TyperGroup) else {}
        self._command_line = {
            name for each in commands.values() for name in _options_by_name(each).keys() - options(each).keys()
        }

    def group(self, tables: Mapping[str, Any], path: CommandPath) -> None:
        """Check the tables at the top, or below the first words of commands."""
        known = {command[len(path)] for command in self._commands if command[: len(path)] == path}
        known |= set() if path else set(self._names)
        for name, content in tables.items():
            inner = (*path, name)
            if name not in known and inner != (DEFAULTS,):
                what = "section" if isinstance(content, dict) else "key outside of a section"
                full = [".".join((*path, word)) for word in (known if path else known | {DEFAULTS})]
                self._add_problem(path, f"unknown {what} {'.'.join(inner)!r}{nearest('.'.join(inner), full)}")
            elif not isinstance(content, dict):
                self._add_problem(path, f"{name!r} must be a section: use [{'.'.join(inner)}]")
            elif inner == (DEFAULTS,):
                self._section(inner, content, shared_flags(self._commands))
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
            if flag not in flags and flag in self._command_line:
                self._add_problem(path, f"{flag}: can only be passed on the command line")
            elif flag not in flags:
                self._add_problem(path, f"unknown key {flag!r}{nearest(flag, flags)}")
            elif redact(f"{flag}={value}") != f"{flag}={value}":
                self._add_problem(
                    path,
                    f"{flag}: secrets are not allowed here; use {variables(flags[flag][0])[0]}, or a setting that names a file",
                )
            else:
                problems = [_problem(option, value, self._context) for option in flags[flag]]
                if any(problems):
                    self._add_problem(path, f"{flag}: {next(filter(None, problems))}")

    def _add_problem(self, path: CommandPath, problem: str) -> None:
        section = f" [{'.'.join(path)}]" if path else ""
        self.file.problems.append(f"config file {self.file.path}{section}: {problem}")


def probe_context(context: typer.Context) -> typer.Context:
    """A context for checking values: callbacks of options have no effect in it."""
    return typer.Context(context.command, parent=context, resilient_parsing=True)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``s3.endpoint`` is a flag's name, and to TOML a table in a table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _problem(option: TyperOption, value: object, context: typer.Context) -> str:
    """Return why a value is not valid; empty if it is."""
    kind = kind_of(option)
    fits = type(value) in {kind, int if kind is float else kind}
    if kind is list:
        fits = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
    if not fits:
        return f"{value!r} is not {_TYPE_NAMES[kind]}"
    try:
        option.process_value(probe_context(context), [value] if kind is list and isinstance(value, str) else value)
    except typer.BadParameter as error:
        return f"{value!r}: {error.message}"
    return ""


def kind_of(option: TyperOption) -> type:
    """Return the TOML type of a flag. Durations, sizes and other values that are parsed later are strings."""
    return list if option.multiple else {"bool": bool, "int": int, "float": float}.get(option.bare_type(), str)
