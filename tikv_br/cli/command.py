"""Declaration of commands.

The flags of a command are the fields of a class, and its function gets one object of that class. `flag` and `argument` declare a
field: default, help, names and placeholder. Name, environment variable and key in the config file follow from the field's name. A field
whose type is another `Flags` class stands for all flags of that class. In help, a class's own fields come before its bases' fields.

Groups of commands, which are imported only when they run, and the command that a group runs by default.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import logging
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

import typer
import typer.main
from msgspec import Struct
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from tikv_br.cli import help as help_text
from tikv_br.storage.url import expand_home

log = logging.getLogger(__name__)
CommandPath = tuple[str, ...]
"""The words that call a command, without the program name."""
LEADING = "flags before the command"
"""Keys in a context's ``meta``."""
REQUIRED: Any = object()
"""The default of a flag that must be set."""
_PLACES = {"FILE", "DIR", "PATH", "URL"}
"""Placeholders of values that are paths, or may be."""
Built = TypeVar("Built", bound="Flags")
Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., None])
_declared: dict[str, dict[str, Callable[[], TyperCommand]]] = {}
"""Functions that build the commands of the imported modules, by the first and last word of a command."""


class FlagKind(Struct, frozen=True):
    """A kind of value that is written as text, such as a duration; `parse` raises `typer.BadParameter`."""

    metavar: str
    parse: Callable[[str], Any]

    def parse_optional(self, value: str | None) -> Any:  # noqa: ANN401 - whatever the kind is
        """As `parse`; None for None and for an empty text."""
        return self.parse(value) if value else None


class _Declaration(Struct, frozen=True):
    """Arguments for Typer besides the field's type."""

    default: Any
    make: Callable[..., Any]
    attributes: Mapping[str, Any]
    kind: FlagKind | None = None
    names: tuple[str, ...] = ()
    scope: str = ""

    @property
    def value(self) -> Any:  # noqa: ANN401 - what the field's type is
        """The value of a flag that is not set."""
        if isinstance(self.default, list):
            return list(self.default)
        if self.kind is None or self.default is REQUIRED:
            return self.default
        return self.kind.parse_optional(self.default)

    def __get__(self, _flags: object, _owner: type[Flags]) -> Any:  # noqa: ANN401
        """The default, of which a class of flags is asked: objects have values of their own."""
        return self.value

    def parameter(
        self,
        name: str,
        hint: Any,  # noqa: ANN401 - a type
        path: CommandPath,
        shared: bool,
        prefix: str,
    ) -> inspect.Parameter:
        """The field as a parameter of the command at a path."""
        if self.kind is not None:
            hint = str if isinstance(self.default, str) else str | None
        if self.make is typer.Argument:
            info = self.make(**self.attributes)
        else:
            names = self.names or (f"--{prefix}{name.replace('_', '-')}",)
            if hint is bool and self.default and "/" not in names[0]:
                names = (f"{names[0]}/--no-{names[0][2:]}",)
            owner = () if shared or self.scope == "shared" else path
            own = [variable(owner, each[2:].split("/")[0]) for each in names if each.startswith("--")]
            variables = None if self.scope == "command line" else own if len(own) > 1 else own[0]
            word = names[0].split("/")[0][2:]
            hidden = not self.attributes["help"] or help_text.is_advanced(path, word)
            shown = {"rich_help_panel": help_text.panel_of(word), "hidden": hidden}
            info = self.make(*names, envvar=variables, **shown, **self.attributes)
        default = inspect.Parameter.empty if self.default is REQUIRED else self.default
        return inspect.Parameter(
            parameter_name(name, prefix),
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint, info],
        )


def flag(
    default: Any,  # noqa: ANN401 - what the field's type is
    text: str,
    *names: str,
    kind: FlagKind | None = None,
    limits: tuple[int, int] | None = None,
    shared: bool = False,
    command_line: bool = False,
    **attributes: Any,  # noqa: ANN401 - what `typer.Option` takes
) -> Any:  # noqa: ANN401 - for the type of the field
    """A field that is a flag; `text` is its help, and the default of a `kind` is written as text.

    The first of `names` is the present one; further long ones are old spellings, which help does not show. `shared`: see `Flags`. A `command_line` flag has no environment variable, and no key in the config file.
    """
    attributes["help"] = text
    if kind is not None:
        convert = kind.parse_optional if default is None else kind.parse
        attributes |= {"callback": convert, "metavar": kind.metavar}
    if limits is not None:
        attributes = {"min": limits[0], "max": limits[1], "metavar": "N"} | attributes
    scope = "shared" if shared else "command line" if command_line else ""
    return _Declaration(default, typer.Option, attributes, kind, names, scope)


def argument(default: Any, metavar: str, text: str, **attributes: Any) -> Any:  # noqa: ANN401 - as `flag`
    """A field that is a positional argument; `metavar` is in brackets if it may be omitted."""
    attributes |= {"metavar": metavar, "help": text}
    return _Declaration(default, typer.Argument, attributes)


class _Group(Struct, frozen=True):
    kind: type[Flags]

    @property
    def value(self) -> Flags:
        return self.kind()


def flags_of(kind: type[Flags]) -> Any:  # noqa: ANN401 - as `flag`
    """A field for all flags of another class, with a default: that all of them are at theirs."""
    return _Group(kind)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class Flags:
    """Base of classes whose fields are flags, arguments, or other `Flags`.

    No dataclasses: making one takes half a millisecond, and a small command has a dozen.

    Flags of a class with ``shared=True`` have one environment variable for all commands, and may be in ``[defaults]``. A ``prefix``
    begins their names. Neither holds for flags of the class's bases.
    """

    own: ClassVar[tuple[bool, str]]

    def __init_subclass__(cls, *, shared: bool = False, prefix: str = "") -> None:
        """Keep what holds for the class's own flags."""
        cls.own = shared, prefix

    def __init__(self, **values: object) -> None:
        known = _declarations(type(self))
        if odd := values.keys() - known.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(odd))}")
        for name, (declaration, _) in known.items():
            value = values.get(name, REQUIRED)
            if value is REQUIRED and declaration is not None:
                value = declaration.value
            if value is REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {name}")
            vars(self)[name] = value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.values(type(self)) == other.values(type(self))

    __hash__ = None  # type: ignore[assignment] # flags may be lists

    def replaced(self, **changes: object) -> Self:
        """The same flags with other values of some."""
        return type(self)(**{name: getattr(self, name) for name in _declarations(type(self))} | changes)

    def combined(self) -> dict[str, Any]:
        """Options that several of the flags make together. Raises `UsageError`."""
        return {}

    def fill(self, options: type[Options], **others: object) -> Options:
        """An operation's options, from the flags of the same names and `others`."""
        return options(**self.values(options) | others)

    def values(self, options: type[object]) -> dict[str, Any]:
        """The flags that `options`, a struct, a dataclass or other `Flags`, has too."""
        names: Collection[str]
        if issubclass(options, Flags):
            names = _declarations(options)
        elif issubclass(options, Struct):
            names = options.__struct_fields__
        else:
            names = {each.name for each in dataclasses.fields(cast("Any", options))}
        return {name: value for name, value in _values(self) if name in names}


class AroundFlags(Flags):
    """Flags that act before and after the function of the command that they are a field of."""

    def around(self, path: str, flags: Flags) -> AbstractContextManager[None]:
        """The context that the function runs in; ``flags`` are the values of the command at ``path``."""
        raise NotImplementedError


def _declarations(flags: type[Flags]) -> dict[str, tuple[_Declaration | _Group | None, type[Flags]]]:
    """Declaration, if there is one, and class of each field; those of the bases come first."""
    found: dict[str, tuple[_Declaration | _Group | None, type[Flags]]] = {}
    for owner in reversed(flags.__mro__[: flags.__mro__.index(Flags)]):
        for name in vars(owner).get("__annotations__", {}):
            found.pop(name, None)
            found[name] = vars(owner).get(name), owner
    return found


def _values(flags: Flags) -> Iterator[tuple[str, Any]]:
    for name in _declarations(type(flags)):
        value = getattr(flags, name)
        if isinstance(value, Flags):
            yield from _values(value)
        yield name, value
    yield from flags.combined().items()


def command(
    path: str,
    example: str = "",
    cls: type[TyperCommand] | None = None,
    former: str = "",
    **attributes: Any,  # noqa: ANN401 - what `Typer.command` takes
) -> Callable[[Function], Function]:
    """Make a function the command at `path`, such as ``backup raw``.

    Its first parameter is the `Flags` of the command; it may have a second one, the `typer.Context`. Its docstring is the help,
    which ends with an example of these arguments. ``former`` is its path in earlier versions, which still works, hidden and with
    a warning.
    """
    if former:
        old = command(former, example, cls, hidden=True, **attributes)
        new = command(path, example, cls, **attributes)
        return lambda function: new(_renamed(old, function, former, path))
    words = tuple(path.split())
    epilog = f"\b\nExample:\n  tikv-br {path} {example}".rstrip()  # \b: do not wrap

    def make(function: Callable[..., None]) -> TyperCommand:
        flags, *others = inspect.signature(function, eval_str=True).parameters.values()

        @functools.wraps(function)
        def run(**values: Any) -> None:  # noqa: ANN401 - Typer passes what the signature below says
            rest = {each.name: values[each.name] for each in others}
            built = build(flags.annotation, values)
            with ExitStack() as stack:
                for each in vars(built).values():
                    if isinstance(each, AroundFlags):
                        stack.enter_context(each.around(path, built))
                function(built, **rest)

        parameters = [*_parameters(flags.annotation, words), *others]
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in keywords}
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(words[-1], cls=cls or Command, epilog=epilog, **attributes)(run)
        return cast("TyperCommand", typer.main.get_command(app))

    def register(function: Function) -> Function:
        _declared.setdefault(words[0], {})[words[-1]] = functools.cache(functools.partial(make, function))
        return function

    return register


def _renamed(
    register: Callable[[Callable[..., None]], Callable[..., None]], function: Function, former: str, path: str
) -> Function:
    """Register `function` under the path of earlier versions, too."""

    @functools.wraps(function)
    def warn(*arguments: Any, **named: Any) -> None:  # noqa: ANN401
        log.warning("`tikv-br %s` is now `tikv-br %s`; the next version no longer has the old name", former, path)
        function(*arguments, **named)

    register(warn)
    return function


_Field = tuple[str, Any, _Declaration | None, type[Flags]]
"""Name, type, declaration (None: other `Flags`) and class of a field."""
_known: dict[type[Flags], list[_Field]] = {}


def _fields(flags: type[Flags]) -> list[_Field]:
    if flags not in _known:  # each command asks twice, and to evaluate type hints takes long
        hints = typing.get_type_hints(flags)
        _known[flags] = sorted(
            (
                (name, hints[name], each if isinstance(each, _Declaration) else None, owner)
                for name, (each, owner) in _declarations(flags).items()
            ),
            key=lambda field: flags.__mro__.index(field[3]),
        )
    return _known[flags]


def _parameters(flags: type[Flags], path: CommandPath) -> Iterator[inspect.Parameter]:
    for name, hint, declaration, owner in _fields(flags):
        if declaration is None:
            yield from _parameters(hint, path)
        else:
            yield declaration.parameter(name, hint, path, *owner.own)


def build(flags: type[Built], values: Mapping[str, Any]) -> Built:
    """Flags of the values of a command's parameters."""
    return flags(
        **{
            name: build(hint, values)
            if declaration is None
            else _expanded(values[parameter_name(name, owner.own[1])], declaration)
            for name, hint, declaration, owner in _fields(flags)
        }
    )


def _expanded(value: Any, declaration: _Declaration) -> Any:  # noqa: ANN401 - whatever the flag is
    """A path with the home directory for ``~``: in config files and variables, and behind ``=``, no shell does that."""
    if not _PLACES & set(re.findall("[A-Z]+", str(declaration.attributes.get("metavar", "")))):
        return value
    if isinstance(value, list):
        return [_expanded(each, declaration) for each in value]
    if isinstance(value, Path):
        return Path(expand_home(str(value)))
    return expand_home(value) if isinstance(value, str) else value


def given(context: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line, not only in the environment or the config file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def parameter_name(field: str, prefix: str) -> str:
    """The name of a field's parameter."""
    return prefix.replace(".", "_") + field


def variable(path: CommandPath, name: str) -> str:
    """The environment variable of a flag: of one that commands share (no path), or of one command's."""
    return "_".join(["TIKV_BR", *path, name]).upper().replace("-", "_").replace(".", "_")


class PlainValues:
    """Mixin of commands and groups that takes most values as they are: to convert them, Typer would load pydantic, a fifth of the time of a small command."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - public Typer has no names for the types
        """The parameters, ``--help`` included."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if not isinstance(each.process_value, functools.partial):
                each.process_value = functools.partial(_process, each, each.process_value)
        return found


def _process(parameter: TyperOption | TyperArgument, convert: Callable[..., Any], context: Any, value: Any) -> Any:  # noqa: ANN401 - public Typer has no name for the type
    has_many = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    source = context.get_parameter_source(parameter.name)
    is_default = source is not None and source.name == "DEFAULT"
    found = value if is_default else _plain(parameter.type_descriptor.annotation, value)
    if found is None and value is None and not parameter.required:
        found = () if has_many else None
    elif found is None or (parameter.required and not found):
        return convert(context, value)  # and words what is missing or wrong
    return found if parameter.callback is None else parameter.callback(context, parameter, found)


def _plain(hint: Any, value: Any) -> Any:  # noqa: ANN401 - a type, and a value of it
    """A value from outside as one of a parameter's type; None if that takes more than a look."""
    if typing.get_origin(hint) is list and isinstance(value, list | tuple):
        items = [_plain(typing.get_args(hint)[0], each) for each in value]
        return None if None in items else items
    if not isinstance(value, str):
        return None
    if isinstance(hint, enum.EnumType):
        members: list[enum.Enum] = list(hint)
        return next((each for each in members if each.value == value), None)
    return value if hint is str or value in typing.get_args(hint) else None


class Command(PlainValues, TyperCommand):
    """A command with a plain usage line, and options in groups."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - public Typer has no name for the type
        """``[OPTIONS] [ID] KEY``: placeholders have the brackets that they need."""
        return ["[OPTIONS]", *(str(each.metavar) for each in self.params if isinstance(each, TyperArgument))]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Take the flags that stood before the command, too."""
        return super().parse_args(ctx, [*ctx.meta.get(LEADING, ()), *args])

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """List the flags."""
        help_text.write_options(self, ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:  # noqa: ANN401
        """Offer all flags but removed ones, in their present spelling, and values."""
        for each in self.params:
            if isinstance(each, TyperOption):
                each.hidden = not each.help
                each.opts = help_text.present_names(each)
        return super().shell_complete(ctx, incomplete)


GLOBAL_FLAGS = ("--output", "--config", "--log-level", "--log-file", "--log-format", "--quiet", "-q")
"""Flags of every command, which may also stand before it; all but the last two take a value."""


def split_leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags that stand before the command, with their values, and the rest."""
    count = 0
    while count < len(arguments) and arguments[count].split("=")[0] in GLOBAL_FLAGS:
        takes_value = arguments[count] in GLOBAL_FLAGS[:-2]  # `--output=json` has it
        count += 2 if takes_value else 1
    return arguments[:count], arguments[count:]


class Group(PlainValues, TyperGroup):
    """A group of commands."""


class CommandTable(Mapping[str, TyperCommand]):
    """The commands of a group by name. A lookup imports modules until one has the command, and builds only that: flags take longer to build than to import."""

    def __init__(self, group: str, modules: Sequence[str]) -> None:
        self._declared, self._modules = _declared.setdefault(group, {}), list(modules)

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in self:
            raise KeyError(name)
        return self._declared[name]()

    def __contains__(self, name: object) -> bool:
        while name not in self._declared and str(name)[:1].isalpha() and self._modules:
            importlib.import_module(self._modules.pop(0))
        return name in self._declared

    def __iter__(self) -> Iterator[str]:
        while self._modules:
            importlib.import_module(self._modules.pop(0))
        return iter(self._declared)

    def __len__(self) -> int:
        return len(list(iter(self)))


class LazyCommand(Struct, frozen=True):
    """A command, or group of commands, of modules that are not imported yet; `help` is its line in the list of commands, below `panel`.

    Without a panel it is not listed.
    """

    modules: tuple[str, ...]
    help: str
    panel: str

    def load(self, name: str) -> TyperCommand | TyperGroup:
        """The command, or the group, whose commands are built by need."""
        importlib.import_module(self.modules[0])
        if list(_declared[name]) == [name]:
            return _declared[name][name]()
        table = CommandTable(name, self.modules)
        default = DefaultCommandGroup.default_command
        short = f"`tikv-br {name}` with flags is short for `tikv-br {name} {default}`."
        has_default = default in table
        text = f"{self.help}\n\n{short}" if has_default else self.help
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.callback(cls=DefaultCommandGroup if has_default else Group, help=text, no_args_is_help=True)(lambda: None)
        group = cast("TyperGroup", typer.main.get_command(app))
        group.name = name
        group.commands = table  # type: ignore[assignment] # it is only read
        return group


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
        if args and not (args[0] in self.commands or self._is_for_group(ctx, args[0])):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def _is_for_group(self, ctx: Any, word: str) -> bool:  # noqa: ANN401
        """Whether a word that is no command asks for the group's help, or is a typing error (then its suggestion follows), not the id of a backup."""
        if word in ctx.help_option_names:
            return not help_text.shows_all(ctx)
        return word.isalpha() and bool(difflib.get_close_matches(word, self.commands))

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
