"""A plugin of mypy: functions of `dataclasses` are not for structs of msgspec, which mypy takes for dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mypy.plugin import FunctionContext, Plugin
from mypy.types import CallableType, Instance, Type, TypeType, TypeVarType, UnionType, get_proper_type

FUNCTIONS = {f"dataclasses.{name}" for name in ("asdict", "astuple", "fields", "replace")}
STRUCT = "msgspec.Struct"


class Structs(Plugin):
    """Reports each such call."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """Only calls of these functions are looked at."""
        return _check if fullname in FUNCTIONS else None


def _check(context: FunctionContext) -> Type:
    for name in {name for given in context.arg_types[0] for name in _structs(given)}:
        context.api.fail(f"{name} is a struct: use msgspec.structs", context.context)
    return context.default_return_type


def _structs(given: Type) -> Iterator[str]:
    match get_proper_type(given):
        case Instance(type=kind) if kind.has_base(STRUCT):
            yield kind.name
        case UnionType(items=items):
            for each in items:
                yield from _structs(each)
        case (
            TypeVarType(upper_bound=inner) | TypeType(item=inner) | CallableType(ret_type=inner)
        ):  # a class, as of `fields`
            yield from _structs(inner)


def plugin(version: str) -> type[Plugin]:  # noqa: ARG001 - mypy's own
    """The plugin's class, by the name that mypy expects."""
    return Structs
