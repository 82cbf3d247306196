"""JSON records that detect damage: strictly typed, versioned and hashed, encrypted if the backup is."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import functools
import hashlib
import hmac
import json
import operator
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import orjson
import zstandard

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
    document = {
        "format_version": FORMAT_VERSION,
        "content": record,
        "content_sha256": hashlib.sha256(_canonical(record)).hexdigest(),
    }
    return (json.dumps(document, default=_plain, indent=1) + "\n").encode()


_COMPACT_START = f'{{"format_version": {FORMAT_VERSION}, "content": '.encode()
_COMPACT_END = b', "content_sha256": "%s"}\n'
_COMPACT_END_SIZE = len(_COMPACT_END % bytes(64))


def dump_compact(record: object) -> bytes:
    """As `dump`, on one line: `load` reads it in a fifth of the time, as the content is there in the form that is hashed."""
    content = _canonical(record)
    return _COMPACT_START + content + _COMPACT_END % hashlib.sha256(content).hexdigest().encode()


def dump_pieces(record: object) -> Iterator[bytes]:
    """A document for a dataclass instance, in pieces: the items of its sequences are on a line each, and none is kept.

    `load` reads it as it reads that of `dump`, from which it differs in white space only.
    """
    digest = hashlib.sha256()

    def hashed(piece: bytes) -> bytes:
        digest.update(piece.replace(b"\n", b""))
        return piece

    yield f'{{\n "format_version": {FORMAT_VERSION},\n "content": '.encode()
    for place, (name, value) in enumerate(sorted(_plain(record).items())):
        yield hashed((b"," if place else b"{") + _canonical(name) + b":")
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            yield hashed(_canonical(value))
            continue
        blocks = value.blocks() if isinstance(value, RecordList) else map(_canonical, value)
        for index, block in enumerate(blocks):
            yield hashed((b",\n" if index else b"[\n") + block)
        yield hashed(b"]" if len(value) else b"[]")
    yield hashed(b"}")
    yield f',\n "content_sha256": "{digest.hexdigest()}"\n}}\n'.encode()


class RecordList(Sequence[T]):
    """Many instances of a dataclass in little memory: their JSON, compressed by blocks. To be read in order.

    Equal to a tuple of the same instances.
    """

    _BLOCK = 512

    def __init__(self, kind: type[T], records: Iterable[T] = ()) -> None:
        self._decode = _decoder(typing.cast("Hashable", kind))
        self._full: list[bytes] = []
        self._rest: list[T] = []
        for record in records:
            self.append(record)

    def append(self, record: T) -> None:
        """Add a record at the end."""
        self._rest.append(record)
        if len(self._rest) == self._BLOCK:
            packed = zstandard.compress(self._lines(), 1)
            self._full.append(memoryview(packed).tobytes())  # `packed` has a buffer for the uncompressed size
            self._rest = []

    def blocks(self) -> Iterator[bytes]:
        """The JSON of some hundred records each, as a list's items, one a line."""
        yield from map(zstandard.decompress, self._full)
        if self._rest:
            yield self._lines()

    def _lines(self) -> bytes:
        return b",\n".join(map(_canonical, self._rest))

    def __len__(self) -> int:
        return len(self._full) * self._BLOCK + len(self._rest)

    def __iter__(self) -> Iterator[T]:
        for block in self.blocks():
            yield from map(self._decode, orjson.loads(b"[%s]" % block))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(operator.eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))


def load(kind: type[T], data: bytes, name: str) -> T:
    """The record of dataclass ``kind`` in object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` if newer."""
    if (content := _compact_content(data)) is not None:
        with contextlib.suppress(_Malformed, TypeError, ValueError):
            return typing.cast("T", _decoder(typing.cast("Hashable", kind))(content))
    return _load_document(kind, data, name)


def _load_document(kind: type[T], data: bytes, name: str) -> T:
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
        content = _checked_content(document)
        try:
            record = _decoder(typing.cast("Hashable", kind))(content)
        except (_Malformed, TypeError, ValueError):
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


def _compact_content(data: bytes) -> object:
    """What `dump_compact` was given, with dataclasses as dictionaries; None if it has not written exactly these bytes."""
    content = data[len(_COMPACT_START) : -_COMPACT_END_SIZE]
    if data != _COMPACT_START + content + _COMPACT_END % hashlib.sha256(content).hexdigest().encode():
        return None
    try:
        found: object = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return found if _canonical(found) == content else None  # a field that is there twice


def _checked_content(document: dict[str, Any]) -> object:
    if set(document) != {"format_version", "content", "content_sha256"}:
        raise _Malformed("its outermost fields are not the expected ones")
    digest = hashlib.sha256(_canonical(document["content"])).hexdigest()
    if digest != document["content_sha256"]:
        recorded = str(document["content_sha256"])
        raise _Malformed(f"checksum mismatch (expected sha256 {recorded[:16]}…, found {digest[:16]}…)")
    return document["content"]


def _canonical(content: object) -> bytes:
    """The JSON that is hashed: keys sorted, no spaces, ASCII."""
    try:
        data = orjson.dumps(content, _plain, orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS)
    except orjson.JSONEncodeError:  # a path that is not UTF-8
        data = b"\xff"
    if data.isascii():
        return data
    return json.dumps(content, default=_plain, sort_keys=True, separators=(",", ":")).encode()


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Malformed("a field appears twice")
    return found


def _reject_float(text: str) -> float:
    raise _Malformed(f"{text} is not an integer")


def _plain(value: Any) -> Any:  # noqa: ANN401 - any type that a field may have
    """What JSON has for it; that of a dataclass's fields is left to further calls."""
    kind: Any = type(value)
    if kind is bytes:
        return value.hex()
    if kind is RecordList:
        return list(value)
    found = {
        name: field.label if type(field := getattr(value, name)) is ApiVersion else field for name in _fields(kind)
    }
    for name, default in _later(kind).items():
        if found[name] == default:
            del found[name]
    return found


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
    """What does the same as `_record` in a tenth of the time, but raises `_Malformed`, TypeError or ValueError without saying where."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(typing.cast("type", kind))
    if typing.get_origin(kind) in {tuple, Sequence} and typing.get_args(kind)[1:] in {(), (Ellipsis,)}:
        return _sequence_decoder(_decoder(typing.get_args(kind)[0]))
    if kind is bytes:
        return bytes.fromhex
    return _integer if kind is int else _string if kind is str else lambda value: _record(kind, value, "")


def _dataclass_decoder(kind: type) -> Decode:
    decoders = {name: _decoder(field) for name, field in _fields(kind).items()}
    names, later = decoders.keys(), _later(kind).keys()

    def decode(value: object) -> object:
        if type(value) is not dict:
            raise _Malformed
        if value.keys() == names:
            return kind(*[decode_field(value[name]) for name, decode_field in decoders.items()])
        if (names ^ value.keys()) - (later - value.keys()):
            raise _Malformed
        return kind(**{name: decoders[name](found) for name, found in value.items()})

    return decode


def _sequence_decoder(decode: Decode) -> Decode:
    def decode_all(value: object) -> object:
        if type(value) is not list:
            raise _Malformed
        return tuple(map(decode, value))

    return decode_all


def _integer(value: object) -> object:
    if type(value) is int and 0 <= value < _U64:
        return value
    raise _Malformed


def _string(value: object) -> object:
    if type(value) is str:
        return value
    raise _Malformed


def _dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise _Malformed(f"{where or 'content'} is not an object")
    fields = _fields(kind)
    if odd := (fields.keys() ^ value.keys()) - (_later(kind).keys() - value.keys()):
        raise _Malformed(f"{where or 'content'} has missing or unknown fields: {', '.join(sorted(odd))}")
    return kind(**{name: _record(fields[name], value[name], f"{where}.{name}".lstrip(".")) for name in value})


@functools.cache
def _fields(kind: type) -> dict[str, object]:
    """Names and types of a dataclass's fields: to evaluate the annotations takes longer than to read a record."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _later(kind: type) -> dict[str, object]:
    """Names of the fields that may be missing, and what they are then."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.metadata.get("later")}


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
