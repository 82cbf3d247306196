"""JSON records that detect damage: strictly typed, versioned and hashed, encrypted if the backup is."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import hashlib
import hmac
import json
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tikv_br.backupset import layout
from tikv_br.errors import BackupDamaged, BackupUnsupported, CrypterMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import IV_SIZE, KEY_SIZES, Crypter

FORMAT_VERSION = 1
LATER: Mapping[str, bool] = {"later": True}
"""Metadata of a dataclass's field that older documents do not have; they get its default value."""

T = TypeVar("T")
_U64 = 1 << 64
_END = b"}\n"


class _Malformed(Exception):
    """The content does not match the type."""


def dump(record: object) -> bytes:
    """The document for a dataclass instance."""
    content = _plain(record)
    document = {
        "format_version": FORMAT_VERSION,
        "content": content,
        "content_sha256": hashlib.sha256(_canonical(content)).hexdigest(),
    }
    return (json.dumps(document, indent=1) + "\n").encode()


_COMPACT_START = f'{{"format_version": {FORMAT_VERSION}, "content": '.encode()
_COMPACT_END = b', "content_sha256": "%s"}\n'
_COMPACT_END_SIZE = len(_COMPACT_END % bytes(64))


def dump_compact(record: object) -> bytes:
    """As `dump`, on one line: `load` reads it in half the time, as the content is there in the form that is hashed."""
    content = _canonical(_plain(record))
    return _COMPACT_START + content + _COMPACT_END % hashlib.sha256(content).hexdigest().encode()


def dump_pieces(record: object) -> Iterator[bytes]:
    """A document for a dataclass instance, in pieces: the items of its sequences are on a line each, and none is kept.

    `load` reads it as it reads that of `dump`, from which it differs in white space only.
    """
    digest = hashlib.sha256()

    def hashed(piece: bytes) -> bytes:
        digest.update(piece)
        return piece

    yield f'{{\n "format_version": {FORMAT_VERSION},\n "content": '.encode()
    names = sorted(
        field.name for field in dataclasses.fields(typing.cast("Any", record)) if not _is_omitted(record, field)
    )
    for place, name in enumerate(names):
        yield hashed(("," if place else "{").encode() + json.dumps(name).encode() + b":")
        value = getattr(record, name)
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            yield hashed(_canonical(_plain(value)))
            continue
        for index, item in enumerate(value):
            yield hashed(b"," if index else b"[") + b"\n" + hashed(_canonical(_plain(item)))
        yield hashed(b"]" if len(value) else b"[]")
    yield hashed(b"}")
    yield f',\n "content_sha256": "{digest.hexdigest()}"\n}}\n'.encode()


def _is_omitted(record: object, field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("later")) and getattr(record, field.name) == field.default


def load(kind: type[T], data: bytes, name: str) -> T:
    """The record of dataclass ``kind`` in object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` if newer."""
    if not data:
        raise BackupDamaged(f"{name} is empty")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_reject_duplicates, parse_float=_reject_float)
    except (ValueError, RecursionError, _Malformed) as error:
        if not data.endswith(_END):
            raise BackupDamaged(f"{name} is truncated: it ends after {len(data):,} bytes: {error}") from None
        raise BackupDamaged(f"{name} is not a valid JSON document: {error}") from None
    if not isinstance(document, dict):
        raise BackupDamaged(f"{name} is not a JSON object")
    version = document.get("format_version")
    try:
        content = _checked_content(document, data)
        try:
            record = _decoder(typing.cast("Hashable", kind))(content)
        except _Malformed:
            record = _record(kind, content, "")  # names the field
    except _Malformed as error:
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise BackupUnsupported(
                f"{name} has format {version}; this tikv-br reads up to {FORMAT_VERSION}", hint="Use a newer tikv-br."
            ) from None
        raise BackupDamaged(f"{name} is damaged: {error}") from None
    if version != FORMAT_VERSION:  # a newer one has other fields
        raise BackupDamaged(f"{name} is damaged: its format version is invalid")
    if not data.endswith(_END):
        raise BackupDamaged(f"{name} is truncated: its last byte is missing ({len(data):,} bytes)")
    return typing.cast("T", record)


def _checked_content(document: dict[str, Any], data: bytes) -> object:
    if set(document) != {"format_version", "content", "content_sha256"}:
        raise _Malformed("its outermost fields are not the expected ones")
    if data.startswith(_COMPACT_START):
        digest = hashlib.sha256(data[len(_COMPACT_START) : -_COMPACT_END_SIZE]).hexdigest()
        if digest == document["content_sha256"]:
            return document["content"]
    digest = hashlib.sha256(_canonical(document["content"])).hexdigest()
    if digest != document["content_sha256"]:
        recorded = str(document["content_sha256"])
        raise _Malformed(f"checksum mismatch (expected sha256 {recorded[:16]}…, found {digest[:16]}…)")
    return document["content"]


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Malformed("a field appears twice")
    return found


def _reject_float(text: str) -> float:
    raise _Malformed(f"{text} is not an integer")


def _plain(value: object) -> object:
    kind = type(value)
    if kind is int or kind is str:
        return value
    if kind is bytes:
        return typing.cast("bytes", value).hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: _plain(found)
            for name, default in _plain_fields(typing.cast("Hashable", kind))
            if (found := getattr(value, name)) != default
        }
    if isinstance(value, ApiVersion):
        return value.label
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _plain_fields(kind: type) -> tuple[tuple[str, object], ...]:
    """Names of a dataclass's fields, and the value with which each is left out, which is none for most."""
    return tuple(
        (field.name, field.default if field.metadata.get("later") else _NEVER) for field in dataclasses.fields(kind)
    )


_NEVER = object()


def _record(kind: object, value: object, where: str) -> object:
    """``value`` as an instance of ``kind``: a dataclass or one of the types its fields may have."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast("type", kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {tuple, Sequence} and isinstance(value, list):
        if origin is Sequence or arguments[-1] is Ellipsis:
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
    raise _Malformed(f"{where} has the wrong type")


Decode = Callable[[Any], Any]


@functools.cache
def _decoder(kind: Any) -> Decode:  # noqa: ANN401 - any type that a field may have
    """What does the same as `_record` in a tenth of the time, but raises `_Malformed` without saying where."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(typing.cast("type", kind))
    if typing.get_origin(kind) in {tuple, Sequence} and typing.get_args(kind)[1:] in {(), (Ellipsis,)}:
        decode = _decoder(typing.get_args(kind)[0])
        return lambda value: tuple([decode(item) for item in _checked(value, type(value) is list)])
    if kind is int:
        return lambda value: _checked(value, type(value) is int and 0 <= value < _U64)
    if kind is bytes:
        return lambda value: _hex(_checked(value, isinstance(value, str)), "")
    if kind is str:
        return lambda value: _checked(value, type(value) is str)
    return lambda value: _record(kind, value, "")


def _dataclass_decoder(kind: type) -> Decode:
    decoders = {name: _decoder(field) for name, field in _fields(kind).items()}

    def decode(value: object) -> object:
        if not isinstance(value, dict) or (decoders.keys() ^ value.keys()) - (_later(kind) - value.keys()):
            raise _Malformed
        return kind(**{name: decoders[name](found) for name, found in value.items()})

    return decode


def _checked(value: Any, is_valid: bool) -> Any:  # noqa: ANN401, FBT001
    if not is_valid:
        raise _Malformed
    return value


def _dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise _Malformed(f"{where or 'content'} is not an object")
    fields = _fields(kind)
    if odd := (fields.keys() ^ value.keys()) - (_later(kind) - value.keys()):
        raise _Malformed(f"{where or 'content'} has missing or unknown fields: {', '.join(sorted(odd))}")
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


_MARK = b'{"encryption": '
"""How a sealed record begins, and no other does."""
_KEY_HINT = "Pass --crypter.key-file with the key that the backup was encrypted with."


def write_record(store: ObjectStore, name: str, record: object, *, compact: bool = False) -> None:
    """Write a dataclass instance as a sealed object, encrypted where the store's place is. Raises `StorageError`."""
    store.put(name, seal(dump_compact(record) if compact else dump(record), store.location.crypter))


def read_record(store: ObjectStore, kind: type[T], name: str) -> T:
    """Read what `write_record` wrote. Raises `BackupDamaged`, `BackupUnsupported`, `CrypterMismatch`, `StorageError`."""
    return load(kind, unseal(store.get(name), store.location.crypter, name), name)


def seal(record: bytes, crypter: Crypter) -> bytes:
    """The object's bytes for a record: the record itself, where nothing is encrypted."""
    if not crypter.encrypts:
        return record
    iv = crypter.mac("record", record)[:IV_SIZE]
    document = {
        "encryption": crypter.method,
        "format_version": FORMAT_VERSION,
        "key_check": _key_check(crypter, iv).hex(),
        "iv": iv.hex(),
        "ciphertext": base64.b64encode(crypter.stream(iv)(record)).decode(),
    }
    return json.dumps(document).encode()


def unseal(data: bytes, crypter: Crypter, name: str) -> bytes:
    """The record in object ``name``. Raises `CrypterMismatch` for another key or method, `BackupDamaged`."""
    if not data:
        raise BackupDamaged(f"{name} is empty")
    if not data.startswith(_MARK):
        if crypter.encrypts:
            raise _not_encrypted(name)
        return data
    version, method, key_check, iv, ciphertext = _parse_encrypted_record(data, name)
    if crypter.method != method:
        problem = f"the key is for {crypter.method}" if crypter.encrypts else "no key was passed"
        raise CrypterMismatch(f"{name} is encrypted with {method}, but {problem}", hint=_KEY_HINT)
    record = crypter.stream(iv)(ciphertext)
    if crypter.mac("record", record)[:IV_SIZE] != iv:
        if version > FORMAT_VERSION:
            raise BackupUnsupported(f"{name} is encrypted in a newer format", hint="Use a newer tikv-br.")
        if not hmac.compare_digest(key_check, _key_check(crypter, iv)):
            raise CrypterMismatch(f"{name} is encrypted with another key", hint=_KEY_HINT)
        raise BackupDamaged(f"{name} is damaged: its decrypted content does not match its checksum")
    if seal(record, crypter) != data:  # the same content gives the same bytes
        raise BackupDamaged(f"{name} is damaged: the fields around its ciphertext were changed")
    return record


def seal_meta(data: bytes, crypter: Crypter) -> bytes:
    """`backupmeta` as the Go tool encrypts it."""
    if not crypter.encrypts:
        return data
    iv = crypter.mac("backupmeta", data)[:IV_SIZE]
    return iv + crypter.stream(iv)(data)


def unseal_meta(data: bytes, crypter: Crypter) -> bytes:
    """`backupmeta` decrypted with this key; a wrong key gives bytes that do not parse."""
    return crypter.stream(data[:IV_SIZE])(data[IV_SIZE:]) if crypter.encrypts and len(data) > IV_SIZE else data


def meta_mismatch(crypter: Crypter, *, readable_as_it_is: bool) -> CrypterMismatch:
    """Why `backupmeta` does not read with a key, or without one."""
    if readable_as_it_is:
        return _not_encrypted(layout.META)
    if crypter.encrypts:
        return CrypterMismatch(
            f"{layout.META} cannot be read with this key and {crypter.method}: wrong key, or not a backup",
            hint=_KEY_HINT,
        )
    return CrypterMismatch(f"{layout.META} is encrypted, or is not a backup", hint=_KEY_HINT)


def _not_encrypted(name: str) -> CrypterMismatch:
    return CrypterMismatch(
        f"{name} is not encrypted, but a key was passed",
        hint="If this is the right backup, leave out --crypter.*, or pass --crypter.method plaintext.",
    )


def _key_check(crypter: Crypter, iv: bytes) -> bytes:
    return crypter.mac("key check", iv)


def _parse_encrypted_record(data: bytes, name: str) -> tuple[int, str, bytes, bytes, bytes]:
    """Format version, method, key check, IV and ciphertext of a sealed record. Raises `BackupDamaged`."""
    try:
        document = json.loads(data)
        version, method = int(document["format_version"]), str(document["encryption"])
        key_check, iv = bytes.fromhex(document["key_check"]), bytes.fromhex(document["iv"])
        ciphertext = base64.b64decode(document["ciphertext"], validate=True)
    except (ValueError, TypeError, KeyError):
        raise BackupDamaged(f"{name} is damaged: it is not a valid encrypted record") from None
    if len(iv) != IV_SIZE or method not in KEY_SIZES:
        raise BackupDamaged(f"{name} is damaged: its encryption method is unknown")
    return version, method, key_check, iv, ciphertext
