"""A plugin of mypy: functions of `dataclasses` are not for structs of msgspec, which mypy takes for dataclasses."""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import FunctionContext, Plugin
from mypy.types import CallableType, Instance, Type, get_proper_type

FUNCTIONS = {f"dataclasses.{name}" for name in ("asdict", "astuple", "fields", "replace")}
STRUCT = "msgspec.Struct"


class Structs(Plugin):
    """Reports each such call."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """Only calls of these functions are looked at."""
        return _check if fullname in FUNCTIONS else None


def _check(context: FunctionContext) -> Type:
    for given in context.arg_types[0]:
        kind = get_proper_type(given)
        if isinstance(kind, CallableType):  # a class, as of `fields`
            kind = get_proper_type(kind.ret_type)
        if isinstance(kind, Instance) and kind.type.has_base(STRUCT):
            context.api.fail(f"{kind.type.name} is a struct: use msgspec.structs", context.context)
    return context.default_return_type


def plugin(version: str) -> type[Plugin]:  # noqa: ARG001 - mypy's own
    """What mypy asks for."""
    return Structs
