"""A plugin of mypy: functions of `dataclasses` are not for structs of msgspec and flags of commands, which mypy takes for dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mypy.plugin import FunctionContext, Plugin
from mypy.types import CallableType, Instance, Type, TypeType, TypeVarType, UnionType, get_proper_type

FUNCTIONS = {f"dataclasses.{name}" for name in ("asdict", "astuple", "fields", "replace")}
INSTEAD = {
    "msgspec.Struct": "is a struct: use msgspec.structs",
    "tikv_br.cli.command.Flags": "has flags: use its methods",
}


class Structs(Plugin):
    """Reports each such call."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """Only calls of these functions are looked at."""
        return _check if fullname in FUNCTIONS else None


def _check(context: FunctionContext) -> Type:
    for text in {text for given in context.arg_types[0] for text in _mistakes(given)}:
        context.api.fail(text, context.context)
    return context.default_return_type


def _mistakes(given: Type) -> Iterator[str]:
    match get_proper_type(given):
        case Instance(type=kind):
            yield from (f"{kind.name} {text}" for base, text in INSTEAD.items() if kind.has_base(base))
        case UnionType(items=items):
            for each in items:
                yield from _mistakes(each)
        case (
            TypeVarType(upper_bound=inner) | TypeType(item=inner) | CallableType(ret_type=inner)
        ):  # a class, as of `fields`
            yield from _mistakes(inner)


def plugin(version: str) -> type[Plugin]:  # noqa: ARG001 - mypy's own
    """The plugin's class, by the name that mypy expects."""
    return Structs
