"""Records as JSON that notices damage: typed strictly, versioned, and with a hash of its own content.

``{"format_version": 1, "content": {…}, "content_sha256": "…"}``. Bytes are hex, API versions their labels, members of a
`StrEnum` their values, numbers unsigned 64-bit integers. Reading refuses unknown, missing, repeated and ill-typed fields:
a manifest is no place for guesses. A field that came `LATER` is not written while it has its default value, and may be missing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from formats.api_version import ApiVersion
from formats.errors import UnsupportedFormat
from tikv_br.errors import BackupDamaged, BackupUnsupported

FORMAT_VERSION = 1
LATER: Mapping[str, bool] = {"later": True}
"""Metadata of a dataclass's field that older documents do not have; its default value says so."""

T = TypeVar("T")
_U64 = 1 << 64
_END = b"}\n"


class _Malformed(Exception):
    """Where the content is not what the type says."""


def dump(record: object) -> bytes:
    """The document for a dataclass instance."""
    content = _plain(record)
    document = {
        "format_version": FORMAT_VERSION,
        "content": content,
        "content_sha256": hashlib.sha256(_canonical(content)).hexdigest(),
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def load(kind: type[T], data: bytes, name: str) -> T:
    """The record of dataclass ``kind`` in object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` if newer."""
    try:
        document = json.loads(data.decode(), object_pairs_hook=_no_repeats, parse_float=_no_float)
    except (ValueError, RecursionError, _Malformed) as error:
        raise BackupDamaged(f"{name} is no JSON document of ours: {error}") from None
    if not isinstance(document, dict):
        raise BackupDamaged(f"{name} is no JSON object")
    version = document.get("format_version")
    try:
        record = _record(kind, _opened(document), "")
    except _Malformed as error:
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise BackupUnsupported(
                f"{name} has format {version}; this tikv-br reads up to {FORMAT_VERSION}", hint="Use a newer tikv-br."
            ) from None
        raise BackupDamaged(f"{name} is damaged: {error}") from None
    if version != FORMAT_VERSION:  # a newer one has other fields
        raise BackupDamaged(f"{name} is damaged: its format version is none")
    if not data.endswith(_END):
        raise BackupDamaged(f"{name} is damaged: its last byte is missing")
    return typing.cast("T", record)


def _opened(document: dict[str, Any]) -> object:
    if set(document) != {"format_version", "content", "content_sha256"}:
        raise _Malformed("its outermost fields are not the expected ones")
    if hashlib.sha256(_canonical(document["content"])).hexdigest() != document["content_sha256"]:
        raise _Malformed("its content does not have the hash it was written with")
    return document["content"]


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Malformed("a field stands twice")
    return found


def _no_float(text: str) -> float:
    raise _Malformed(f"{text} is no whole number")


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not (field.metadata.get("later") and getattr(value, field.name) == field.default)
        }
    if isinstance(value, ApiVersion):
        return value.label
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _record(kind: object, value: object, where: str) -> object:
    """``value`` as an instance of ``kind``: a dataclass or one of the types its fields may have."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast("type", kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_record(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(value))
    elif origin in {types.UnionType, typing.Union}:
        return None if value is None else _record(arguments[0], value, where)
    elif kind is ApiVersion and isinstance(value, str):
        return _api_version(value, where)
    elif isinstance(kind, type) and issubclass(kind, enum.StrEnum) and isinstance(value, str) and value in set(kind):
        return kind(value)
    elif kind is bytes and isinstance(value, str):
        return _hex(value, where)
    elif type(value) is kind and (kind is not int or 0 <= typing.cast("int", value) < _U64):
        return value
    raise _Malformed(f"{where} is not of its type")


def _dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise _Malformed(f"{where or 'content'} is no object")
    fields = _fields(kind)
    if odd := (fields.keys() ^ value.keys()) - (_later(kind) - value.keys()):
        raise _Malformed(f"{where or 'content'} lacks or does not know {', '.join(sorted(odd))}")
    return kind(**{name: _record(fields[name], value[name], f"{where}.{name}".lstrip(".")) for name in value})


@functools.cache
def _fields(kind: type) -> dict[str, object]:
    """Names and types of a dataclass's fields: to evaluate the annotations takes longer than to read a record."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _later(kind: type) -> frozenset[str]:
    """Names of the fields that may be missing."""
    return frozenset(field.name for field in dataclasses.fields(kind) if field.metadata.get("later"))


def _api_version(label: str, where: str) -> ApiVersion:
    try:
        return ApiVersion.from_label(label)
    except UnsupportedFormat as error:
        raise _Malformed(f"{where}: {error}") from None


def _hex(text: str, where: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise _Malformed(f"{where} is not hexadecimal") from None
