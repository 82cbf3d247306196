"""Requirements of the Go TiKV-BR for a backup that it restores, from its source and from runs.

Shares no code with us but the generated protobuf classes: RocksDB reads the SSTs, keys and values are taken apart here.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fastcrc
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from google.protobuf.message import Message
from rocksdict import Options, Rdict

from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2

META: Final = "backupmeta"
FAMILY: Final = "default"
V2: Final = kvrpcpb_pb2.V2
PREFIX, PREFIX_END = b"r\0\0\0", b"r\0\0\1"
"""The one keyspace of API V2 that the tool knows."""
DATA_PREFIX: Final = b"z"

_GROUP: Final = 8
_PADDED: Final = 0xFF - _GROUP
_TS_BYTES: Final = 8
_EXPIRY_BYTES: Final = 8
_IV_BYTES: Final = 16
_SST_END: Final = (0x88E241B785F4CFF7).to_bytes(8, "little")


@dataclass(frozen=True)
class Directory:
    """A backup as any program sees it: sizes of all objects by name, and a way to read them."""

    sizes: Mapping[str, int]
    read: Callable[[str], bytes]

    @property
    def meta(self) -> brpb_pb2.BackupMeta:
        """The decoded `backupmeta`."""
        return brpb_pb2.BackupMeta.FromString(self.read(META))

    @classmethod
    def local(cls, folder: Path) -> Directory:
        """A folder."""
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        return cls({name: path.stat().st_size for name, path in files.items()}, lambda name: files[name].read_bytes())

    @classmethod
    def s3(cls, admin: Any, bucket: str, prefix: str) -> Directory:  # noqa: ANN401 - boto3's client
        """A prefix of a bucket; ``admin`` is boto3's S3 client."""
        pages = admin.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        sizes = {each["Key"][len(prefix) + 1 :]: each["Size"] for page in pages for each in page.get("Contents", ())}
        return cls(sizes, lambda name: admin.get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read())

    def decrypted(self, key: bytes) -> Directory:
        """The same as the tool and the stores decrypt it: AES in counter mode; the meta's IV leads it, a file's stands in the meta."""

        def plain(data: bytes, iv: bytes) -> bytes:
            return Cipher(algorithms.AES(key), modes.CTR(iv)).decryptor().update(data)

        data = self.read(META)
        meta = plain(data[_IV_BYTES:], data[:_IV_BYTES])
        ivs = {file.name: file.cipher_iv for file in brpb_pb2.BackupMeta.FromString(meta).files}
        return Directory(self.sizes, lambda name: meta if name == META else plain(self.read(name), ivs[name]))

    def with_meta(self, meta: brpb_pb2.BackupMeta) -> Directory:
        """The same with another `backupmeta`."""
        data = meta.SerializeToString()
        return Directory({**self.sizes, META: len(data)}, lambda name: data if name == META else self.read(name))


def unmet_demands(backup: Directory, api_version: int, start: bytes = b"", end: bytes = b"") -> list[str]:
    """Return the requirements that a restore of [start, end) of user keys by the tool would violate; sentences."""
    meta = backup.meta
    wanted = _tool_range(api_version, start, end)
    return [
        *_of_the_meta(meta, api_version, *wanted),
        *itertools.chain.from_iterable(_of_a_file(file, backup, api_version) for file in meta.files),
        *_of_the_order(meta, *wanted),
        *itertools.chain.from_iterable(_of_the_rows(file, backup, api_version) for file in meta.files),
    ]


def _tool_range(api_version: int, start: bytes, end: bytes) -> tuple[bytes, bytes]:
    """The range that the tool looks for: --start and --end as keys of requests."""
    return (PREFIX + start, PREFIX + end if end else PREFIX_END) if api_version == V2 else (start, end)


def _of_the_meta(meta: brpb_pb2.BackupMeta, api_version: int, start: bytes, end: bytes) -> Iterator[str]:
    if meta.api_version != api_version:
        yield f"api_version is {meta.api_version}, the cluster's {api_version}: Unsupported backup api version"
    if not meta.is_raw_kv:
        yield "is_raw_kv is not set: backup meta for non-rawkv is unsupported"
    # The first range that meets the wanted one must hold all of it.
    for part in meta.raw_ranges:
        if part.cf == FAMILY and _meet(part.start_key, part.end_key, start, end):
            if start < part.start_key or _beyond(end, part.end_key):
                yield f"the range {part} does not cover the wanted one"
            break
    else:
        yield "no raw range: no backup data in the range"


def _of_a_file(file: brpb_pb2.File, backup: Directory, api_version: int) -> Iterator[str]:
    if file.cf != FAMILY:
        yield f"{file.name} has cf {file.cf!r}: it is left out without a word"
    if FAMILY not in file.name:
        yield f"{file.name} does not say its column family, which the tool reads off the name"
    if "write" in file.name:
        yield f"{file.name} counts as of the column family write"
    if file.name not in backup.sizes:
        yield f"{file.name} is not there"
    elif file.size > backup.sizes[file.name]:
        yield f"{file.name} has {backup.sizes[file.name]} bytes, not {file.size}: stores refuse it"
    if api_version == V2 and (len(file.start_key) < len(PREFIX) or len(file.end_key) < len(PREFIX)):
        yield f"{file.name} has a bound shorter than a keyspace's prefix: slice bounds out of range"
    if file.end_key and file.start_key >= file.end_key:
        yield f"{file.name} has an empty range: startKey >= endKey"


def _of_the_order(meta: brpb_pb2.BackupMeta, start: bytes, end: bytes) -> Iterator[str]:
    files = sorted((file for file in meta.files if file.cf == FAMILY), key=lambda file: file.start_key)
    for left, right in itertools.pairwise(files):
        if _beyond(left.end_key, right.start_key):
            yield f"{left.name} and {right.name} overlap: Checksum mismatch"
    for file in files:
        if (file.end_key and file.end_key < start) or (end and end <= file.start_key):
            continue  # the tool leaves it out
        if file.start_key < start or _beyond(file.end_key, end):
            yield f"{file.name} reaches out of the range: Checksum mismatch, as all of a file is summed up"


def _of_the_rows(file: brpb_pb2.File, backup: Directory, api_version: int) -> Iterator[str]:
    """Rows outside of their file's range go to other regions than the tool asks to ingest; sums are compared by --checksum."""
    if file.name not in backup.sizes:
        return
    data = backup.read(file.name)
    if not data.endswith(_SST_END):
        yield f"{file.name} is no SST: stores refuse it"
        return
    found = [user_row(key, value, api_version) for key, value in sst_rows(data)]
    outside = [key for key, _ in found if key < file.start_key or (file.end_key and key >= file.end_key)]
    if outside:
        yield f"{file.name} holds {outside[0].hex()}, outside of its range"
    if len({key for key, _ in found}) != len(found):
        yield f"{file.name} holds several versions of a key: Checksum mismatch"
    sums = [0, len(found), sum(len(key) + len(value) for key, value in found)]
    for key, value in found:
        sums[0] ^= fastcrc.crc64.xz(key + value)
    said = [file.crc64xor, file.total_kvs, file.total_bytes]
    if sums != said:
        yield f"{file.name} adds up to {sums}, not {said}: Checksum mismatch"


@functools.lru_cache(maxsize=64)
def sst_rows(data: bytes) -> list[tuple[bytes, bytes]]:
    """All rows of an SST as RocksDB, which ingests it, reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.sst"
        path.write_bytes(data)
        database = Rdict(str(Path(folder) / "rocksdb"), Options(raw_mode=True))
        try:
            database.ingest_external_file([str(path)])
            return [(bytes(key), bytes(value)) for key, value in database.items()]  # type: ignore[arg-type]
        finally:
            database.close()


def user_row(key: bytes, value: bytes, api_version: int) -> tuple[bytes, bytes]:
    """The key of requests and the user's value of a stored row. Raises `ValueError` where a store would die of it."""
    if key[:1] != DATA_PREFIX:
        raise ValueError(f"{key!r} does not begin with z")
    if api_version == kvrpcpb_pb2.V1:
        return key[1:], value
    if api_version == kvrpcpb_pb2.V1TTL:
        if len(value) < _EXPIRY_BYTES:
            raise ValueError(f"the value of {key!r} has no expiry")
        return key[1:], value[:-_EXPIRY_BYTES]
    encoded, flags = key[1:-_TS_BYTES], value[-1:]
    if flags not in {b"\0", b"\1"}:
        raise ValueError(f"the value of {key!r} ends with the flags {flags!r}")
    return _decode_groups(encoded), value[: -1 - _EXPIRY_BYTES * flags[0]]


def _decode_groups(encoded: bytes) -> bytes:
    """Undo the memory-comparable encoding: groups of eight bytes, each with 0xFF less the number of its padding zeros."""
    if len(encoded) % (_GROUP + 1) or not encoded:
        raise ValueError(f"{encoded!r} is no sequence of groups with a timestamp")
    groups = [encoded[begin : begin + _GROUP + 1] for begin in range(0, len(encoded), _GROUP + 1)]
    *full, last = groups
    if any(group[_GROUP] != 0xFF for group in full) or not _PADDED <= last[_GROUP] < 0xFF:
        raise ValueError(f"{encoded!r} has a wrong marker")
    kept = last[_GROUP] - _PADDED
    if any(last[kept:_GROUP]):
        raise ValueError(f"{encoded!r} is padded with other bytes than zeros")
    return b"".join(group[:_GROUP] for group in full) + last[:kept]


def fields(message: Message) -> set[str]:
    """The names of the fields that are set, with those of messages inside."""
    names: set[str] = set()
    for field, value in message.ListFields():
        names.add(field.name)
        if field.message_type is not None:
            inner = value if field.is_repeated else [value]
            names |= {f"{field.name}.{name}" for each in inner for name in fields(each)}
    return names


def _meet(start: bytes, end: bytes, other_start: bytes, other_end: bytes) -> bool:
    return (not end or other_start < end) and (not other_end or start < other_end)


def _beyond(end: bytes, limit: bytes) -> bool:
    """Whether an exclusive end, where empty is no end, lies behind another."""
    return bool(limit) and (not end or end > limit)
