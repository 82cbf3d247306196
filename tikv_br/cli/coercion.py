"""What flags hold becomes what commands take, without pydantic as long as it is plain what that is.

Typer asks pydantic, whose import and models cost every command some 0.2 s of processor time. Most values need none of it:
defaults, texts, numbers in digits, words of a choice, and what a parser of ours reads. All else, and every mistake, is left to
Typer and its messages. Nothing of Typer's is called or changed but the place where it keeps its own converter.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from typer.core import TyperArgument, TyperOption

if TYPE_CHECKING:
    from typer._click import Command, Context, Parameter

_KEPT_AT = "_runtime_param"
_UNSURE = object()
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")

Convert = Callable[[Any], Any]
"""From a value to the converted one, or `_UNSURE`."""


def quicken(command: Command) -> None:
    """Convert the plain values of a command's parameters here, also of its ``--help``, which Typer makes when it is asked for."""
    make_help = command.get_help_option

    def get_help_option(context: Context) -> TyperOption | None:
        option = make_help(context)
        if option is not None:
            _quicken(option)
        return option

    setattr(command, "get_help_option", get_help_option)  # noqa: B010 - mypy takes methods for constant
    for param in command.params:
        _quicken(param)


def _quicken(param: Parameter) -> None:
    if not isinstance(param, (TyperOption, TyperArgument)) or not hasattr(param, "type_descriptor"):
        return  # or a release of Typer that keeps it otherwise, and then takes longer
    if getattr(param, _KEPT_AT, None) is None:
        setattr(param, _KEPT_AT, Plain(_converter(param)))


class Plain:
    """Converts the values of one parameter; Typer's own converter takes over where that is not plain."""

    def __init__(self, convert: Convert) -> None:
        self._convert = convert

    def coerce(self, value: Any, param: TyperOption | TyperArgument, ctx: Context) -> Any:  # noqa: ANN401 - as Typer's
        """See `typer._coercion.RuntimeParam.coerce`."""
        many = getattr(param, "multiple", False) or param.nargs == -1
        if value is None:
            return () if many else None
        found = self._convert(value)
        if found is not _UNSURE:
            return found
        setattr(param, _KEPT_AT, None)
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _converter(param: TyperOption | TyperArgument) -> Convert:
    kind: Any = param.type_descriptor.annotation
    info = param.type_descriptor.parameter_info
    if get_origin(kind) is list:
        return _list_of(_one(get_args(kind)[0], info))
    return _one(kind, info)


def _list_of(convert: Convert) -> Convert:
    def convert_all(values: Any) -> Any:  # noqa: ANN401
        if not isinstance(values, (list, tuple)):
            return _UNSURE
        found = [convert(value) for value in values]
        return _UNSURE if any(each is _UNSURE for each in found) else found

    return convert_all


def _one(kind: Any, info: Any) -> Convert:  # noqa: ANN401
    """How a single value becomes one of a kind; ``info`` is what was said about the parameter."""
    if info.parser is not None:
        return _parsed(info.parser)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice({str(each.value): each for each in kind})
    if get_origin(kind) is Literal:
        return _choice({each: each for each in get_args(kind) if isinstance(each, str)})
    if kind is str:
        return lambda value: value if type(value) is str else _UNSURE
    if kind in {int, float} and not info.clamp:
        return _number(kind, info.min, info.max)
    return lambda _value: _UNSURE


def _parsed(parser: Callable[[Any], Any]) -> Convert:
    def convert(value: Any) -> Any:  # noqa: ANN401
        try:
            return parser(value)
        except (ValueError, AssertionError):  # which Typer tells as a mistake of the flag's
            return _UNSURE

    return convert


def _choice(words: dict[str, Any]) -> Convert:
    def convert(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, enum.Enum):
            return value if value in words.values() else _UNSURE
        return words.get(value, _UNSURE) if isinstance(value, str) else _UNSURE

    return convert


def _number(kind: type[int | float], least: float | None, most: float | None) -> Convert:
    form = _WHOLE if kind is int else _DECIMAL

    def convert(value: Any) -> Any:  # noqa: ANN401
        plain = type(value) in {int, kind} or (type(value) is str and form.fullmatch(value))
        if not plain:
            return _UNSURE
        number = kind(value)
        within = (least is None or number >= least) and (most is None or number <= most)
        return number if within else _UNSURE

    return convert
