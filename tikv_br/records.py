"""JSON records that detect damage: structs and dataclasses, strictly typed by msgspec, versioned and hashed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, overload

import msgspec
import orjson
import zstandard

from tikv_br.errors import BackupDamaged, BackupUnsupported
from tikv_br.formats.errors import UnsupportedFormat

FORMAT_VERSION = 2
"""The newest version of documents. A record whose documents a reader of version 1 must refuse has a property `format_version`."""

MAX_MILLISECONDS = 250_000_000_000_000
"""Upper limit for times and durations in records: until the year 9892, which calendars of programs can still show."""
Milliseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MILLISECONDS)]
"""A time since the epoch, or a duration, in a record."""

T = TypeVar("T")
Later: TypeAlias = Annotated[T, msgspec.Meta(extra={"later": True})]
"""The type of a struct's field that older documents do not have; they get its default value."""
if TYPE_CHECKING:
    RecordSequence: TypeAlias = Sequence[T]
else:
    RecordSequence = tuple[T, ...]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    content: msgspec.Raw
    content_sha256: str


_document = msgspec.json.Decoder(_Document)
_NEGATIVE = re.compile(rb"[:,\[]-")


def dump(record: object) -> bytes:
    """The document for a record."""
    return b"".join(dump_pieces(record))


def dump_pieces(record: object) -> Iterator[bytes]:
    """The document in pieces: the items of the record's sequences are on a line each, and none is kept.

    Without the line breaks, the content is as it is hashed, so `load` does not have to encode it again.
    """
    digest = hashlib.sha256()

    def hashed(piece: bytes) -> bytes:
        digest.update(piece.replace(b"\n", b""))
        return piece

    yield b'{\n "format_version": %d,\n "content": ' % _version_of(record)
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
    yield b',\n "content_sha256": "%s"\n}\n' % digest.hexdigest().encode()


class RecordList(Sequence[T]):
    """Many records of a kind in little memory: their JSON, compressed by blocks. To be read in order.

    Equal to a tuple of the same instances.
    """

    _BLOCK = 512

    def __init__(self, kind: type[T], records: Iterable[T] = ()) -> None:
        self._decoder = _decoder(tuple[kind, ...])  # type: ignore[valid-type]
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
            yield from self._decoder.decode(b"[%s]" % block)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(operator.eq, self, other))


def _version_of(record: object) -> int:
    return getattr(record, "format_version", 1)


def load(kind: type[T], data: bytes, name: str) -> T:
    """The record of ``kind`` in object ``name``. Raises `BackupDamaged`, or `BackupUnsupported` if newer."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        document = _document.decode(data)
        content = bytes(document.content).replace(b"\n", b"")
        if data.endswith(b"}\n") and hashlib.sha256(content).hexdigest() == document.content_sha256:
            record: T = _decoder(kind).decode(content)
            if _is_exact(record, content) and _version_of(record) == document.format_version:
                return record
    return _load_document(kind, data, name)


def _load_document(kind: type[T], data: bytes, name: str) -> T:
    if not data:
        raise BackupDamaged(f"{name} is empty")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        if not data.endswith(b"}\n"):
            raise BackupDamaged(f"{name} is truncated: it ends after {len(data):,} bytes: {error}") from None
        raise BackupDamaged(f"{name} is not a valid JSON document: {error}") from None
    if not isinstance(document, dict):
        raise BackupDamaged(f"{name} is not a JSON object")
    version = document.get("format_version")
    try:
        canonical = _checked_content(document)
        record = convert(document["content"], kind)
        if not _is_exact(record, canonical):
            _check_fields(record, document["content"], "")
    except (msgspec.ValidationError, RecursionError) as error:
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise BackupUnsupported(
                f"{name} has format {version}; this tikv-br reads up to {FORMAT_VERSION}", hint="Use a newer tikv-br."
            ) from None
        raise BackupDamaged(f"{name} is damaged: {_explain(error)}") from None
    if version != _version_of(record):  # a newer one has other fields
        raise BackupDamaged(f"{name} is damaged: its format version is invalid")
    if not data.endswith(b"}\n"):
        raise BackupDamaged(f"{name} is truncated: its last byte is missing ({len(data):,} bytes)")
    return record


def _checked_content(document: dict[str, Any]) -> bytes:
    """The content as it was hashed."""
    if set(document) != {"format_version", "content", "content_sha256"}:
        raise msgspec.ValidationError("its outermost fields are not the expected ones")
    content = _canonical(document["content"], orjson.OPT_SORT_KEYS)
    found, recorded = hashlib.sha256(content).hexdigest(), str(document["content_sha256"])
    if found != recorded:
        raise msgspec.ValidationError(f"checksum mismatch (expected sha256 {recorded[:16]}…, found {found[:16]}…)")
    return content


def _explain(error: Exception) -> str:
    """The message, with the field first if msgspec says where: ``files[0].size: expected int, got str``."""
    reason, _, path = str(error).replace("`", "").partition(" - at $")
    return f"{path.lstrip('.')}: {reason[0].lower()}{reason[1:]}" if path else reason


def _parse(kind: Any, text: Any) -> object:  # noqa: ANN401 - a type of `json_types`, and any JSON
    try:
        return kind.parse(text)
    except UnsupportedFormat as error:
        raise ValueError(str(error)) from None
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"expected {kind.text}") from None


def convert(content: object, kind: type[T]) -> T:
    """The value of a type, such as a struct, for JSON. Raises `msgspec.ValidationError`."""
    _decoder(kind)
    return msgspec.convert(content, kind, dec_hook=_parse)


@functools.cache
def member_decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """A decoder of JSON objects into structs with the bytes of these members as they stand there; ``b""`` = it is absent."""
    absent = msgspec.Raw(b"")
    fields = [(f"c{at}", msgspec.Raw, msgspec.field(default=absent, name=name)) for at, name in enumerate(names)]
    with _building:
        return msgspec.json.Decoder(msgspec.defstruct("Members", fields))


def _build(kind: Any) -> msgspec.json.Decoder[Any]:  # noqa: ANN401 - a type
    with _building:
        return msgspec.json.Decoder(kind, dec_hook=_parse)


_building = threading.Lock()
"""msgspec describes a struct or dataclass when it first meets it. Another thread that meets it at that moment uses half a description, and the process dies."""
_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_build)


def _is_exact(record: object, content: bytes) -> bool:
    """Whether the content surely has each field of the record, once, and nothing else."""
    try:
        return _encode(record) == content and not (b"-" in content and _NEGATIVE.search(content))
    except TypeError:  # an integer of more than 64 bits, or a path that is not UTF-8
        return False


def _check_fields(record: object, content: Any, where: str) -> None:  # noqa: ANN401 - any JSON
    """Check what msgspec does not: that no field is unknown or missing, and integers have at most 64 bits."""
    if isinstance(record, msgspec.Struct) or dataclasses.is_dataclass(record):
        kind: Any = type(record)
        names, _, later, *_ = _fields(kind)
        if odd := (set(names) ^ content.keys()) - (later.keys() - content.keys()):
            raise msgspec.ValidationError(
                f"{where or 'content'} has missing or unknown fields: {', '.join(sorted(odd))}"
            )
        for name, value in content.items():
            _check_fields(getattr(record, name), value, f"{where}.{name}".lstrip("."))
    elif isinstance(record, (list, tuple)):
        for place, (item, value) in enumerate(zip(record, content, strict=True)):
            _check_fields(item, value, f"{where}[{place}]")
    elif isinstance(record, int) and not 0 <= record < 1 << 64:
        raise msgspec.ValidationError(f"{where}: {record} is not an unsigned integer of 64 bits")


_Fields = tuple[tuple[str, ...], Callable[[Any], Iterable[object]], dict[str, object], set[str], set[str]]


@functools.cache
def _fields(kind: Any) -> _Fields:  # noqa: ANN401 - a dataclass or struct
    """Names of the fields in order, what reads them, those that may be missing with their default, with bytes, with an API version."""
    if issubclass(kind, msgspec.Struct):
        hints = {
            name: of for each in reversed(kind.__mro__) for name, of in vars(each).get("__annotations__", {}).items()
        }
        types = {name: hints[name] for name in sorted(kind.__struct_fields__)}
        defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
        later = {name: defaults[name] for name, of in types.items() if "Later[" in of}
    else:
        types = {field.name: field.type for field in sorted(dataclasses.fields(kind), key=lambda field: field.name)}
        later = {}
    names = tuple(types)
    get = operator.attrgetter(*names)
    binary, versions = ({name for name, of in types.items() if kind in str(of)} for kind in ("Hex", "ApiLabel"))
    return names, get if len(names) > 1 else lambda value: (get(value),), later, binary, versions


def _canonical(content: object, options: int = 0) -> bytes:
    """The JSON that is hashed: keys sorted, no spaces, ASCII."""
    try:
        data = _encode(content, options)
    except orjson.JSONEncodeError:  # a path that is not UTF-8
        data = b"\xff"
    if data.isascii():
        return data
    return json.dumps(content, default=_plain, sort_keys=True, separators=(",", ":")).encode()


def _encode(content: object, options: int = 0) -> bytes:
    return orjson.dumps(content, _plain, orjson.OPT_PASSTHROUGH_DATACLASS | options)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise msgspec.ValidationError("a field appears twice")
    return found


def _plain(value: Any) -> Any:  # noqa: ANN401 - any type that a field may have
    """Return a value for JSON; a struct or dataclass becomes a mapping in the order of its fields' names, whose values need further calls."""
    kind: Any = type(value)
    if kind is RecordList:
        return list(value)
    names, get, later, binary, versions = _fields(kind)
    found: dict[str, Any] = dict(zip(names, get(value), strict=True))
    for name, default in later.items():
        if found[name] == default:
            del found[name]
    for name in binary & found.keys() if later else binary:
        found[name] = found[name].hex()
    for name in versions:
        found[name] = getattr(found[name], "label", None)
    return found
