"""The options that a run must share with the unfinished run that it resumes: all, unless their field is declared otherwise."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import NODEFAULT, Meta, Struct, structs

T = TypeVar("T")
_RESUME = "resume"
_NONE = (MISSING, NODEFAULT)
MayChange: TypeAlias = Annotated[T, Meta(extra={_RESUME: ""})]
"""The type of an option that decides on no content: the resumed run may have another value."""


def compared_as(name: str) -> Meta:
    """Annotation of an option that is compared by its effect: the field ``name`` of the record of the run."""
    return Meta(extra={_RESUME: name})


@functools.cache
def declarations(options: type[Struct]) -> Mapping[str, str]:
    """The fields that are declared `MayChange` (``""``), or `compared_as` another name."""
    notes = {each.name: getattr(each.type, "__metadata__", ()) for each in structs.fields(options)}
    extra = {name: [note.extra or {} for note in found if isinstance(note, Meta)] for name, found in notes.items()}
    return {name: each[_RESUME] for name, found in extra.items() for each in found if _RESUME in each}


def compared(record: object) -> dict[str, object]:
    """The values of options that a resumed run must share, by field; also the values of nested ones."""
    return {name: value for name, value, _ in _values(record)}


def chosen(*options: object) -> tuple[str, ...]:
    """The options that a resumed run must share and that are not at their default, as ``name=value``.

    Defaults are left out so that runs of older versions, which did not have an option, can be resumed.
    """
    found = [f"{name}={_text(value)}" for each in options for name, value, default in _values(each) if value != default]
    return tuple(sorted(found))


def differences(begun: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """The values that differ, as ``engine was store, is scan``."""
    names = dict.fromkeys([*wanted, *begun])
    pairs = [(name, begun.get(name, "the default"), wanted.get(name, "the default")) for name in names]
    return [
        f"{name.replace('_', ' ')} was {_text(one)}, is {_text(other)}" for name, one, other in pairs if one != other
    ]


def chosen_differences(begun: Iterable[str] | None, wanted: Iterable[str] | None) -> list[str]:
    """Return the differences of two results of `chosen`; none if one was not recorded, as by older versions."""
    if begun is None or wanted is None:
        return []
    return differences(*(dict(text.split("=", 1) for text in each) for each in (begun, wanted)))


def _values(record: Any) -> Iterator[tuple[str, object, object]]:  # noqa: ANN401 - any dataclass or struct
    """Name, value and default of each compared field."""
    declared = declarations(type(record)) if isinstance(record, Struct) else {}
    for each in structs.fields(record) if isinstance(record, Struct) else fields(record):
        value = getattr(record, each.name)
        if each.name in declared:
            continue
        if is_dataclass(value) or isinstance(value, Struct):
            yield from ((f"{each.name}_{name}", inner, default) for name, inner, default in _values(value))
        else:
            yield each.name, value, _default(each)


def _default(field: Field[Any] | structs.FieldInfo) -> object:
    return field.default if field.default_factory in _NONE else field.default_factory()


def _text(value: object) -> str:
    if isinstance(value, (tuple, frozenset)):
        texts = map(_text, value)
        return ", ".join(sorted(texts) if isinstance(value, frozenset) else texts) or "none"
    if isinstance(value, bytes):
        return value.hex()
    return str(getattr(value, "label", value.value if isinstance(value, enum.Enum) else value))
