"""One region of a backup: its live rows, converted, in one SST written by RocksDB itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import fastcrc
from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options, SstFileWriter

from formats import mce
from formats.api_version import ApiVersion
from formats.keys import DATA_PREFIX, MAX_TS, RAW_MODE, TS_SIZE, KeyCodec
from formats.mce import ENCODED_GROUP, FULL, GROUP
from formats.values import StoredValue, decode_value, encode_value
from tikv_br.cluster.pb import brpb_pb2

CONVERTED_TS: Final = 1
"""The timestamp of every row that a backup brings from V1 or V1TTL to V2."""
_FORMAT_VERSION: Final = 2
_BLOCK_SIZE: Final = 16 << 10
_WINDOW_BITS: Final = -14
_DEFAULT_LEVEL: Final = 32767
_RAW_START: Final = DATA_PREFIX + RAW_MODE
_NO_FLAGS: Final = b"\0"

Row = tuple[bytes, bytes]
"""A data key (with ``z``) and the stored value."""
Live = tuple[bytes, bytes, int, Row]
"""What a reader sees: RPC key, user value, expiry in unix seconds (0 = never), and the row that says so."""
Seen = tuple[bytes, bytes, Row]
"""What a reader of the backup will see: RPC key and user value, and the row to write."""


@dataclass(frozen=True, slots=True)
class Written:
    """What an SST holds, counted over the keys and values that a client of the target sees."""

    crc64xor: int
    total_kvs: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """From the API version of the store to that of the backup: the same, or V2."""

    source: ApiVersion
    target: ApiVersion

    @property
    def allowed(self) -> bool:
        """Whether a store can do it."""
        return self.source is self.target or self.target is ApiVersion.V2

    def rows(self, rows: Iterable[Row], now: int) -> Iterator[Seen]:
        """The rows of a backup, from all rows of a range in key order.

        Older versions, tombstones and what has expired at ``now`` are left out.
        """
        live = _READERS[self.source](rows, now)
        if self.source is self.target:
            return ((rpc, value, row) for rpc, value, _, row in live)
        return self._converted(live)

    def target_range(self, start: bytes, end: bytes) -> tuple[bytes, bytes]:
        """The RPC range of the target that an RPC range of the source becomes."""
        return (start, end) if self.source is self.target else KeyCodec(self.target).rpc_range(start, end)

    def _converted(self, live: Iterable[Live]) -> Iterator[Seen]:
        prefix = KeyCodec(self.target).prefix
        stamp = (MAX_TS - CONVERTED_TS).to_bytes(TS_SIZE, "big")
        for key, value, expiry, _ in live:
            rpc = prefix + key
            stored = encode_value(self.target, StoredValue(value, expiry)) if expiry else value + _NO_FLAGS
            yield rpc, value, (DATA_PREFIX + mce.encode(rpc) + stamp, stored)


def _live_v1(rows: Iterable[Row], now: int) -> Iterator[Live]:
    del now
    for row in rows:
        yield row[0][1:], row[1], 0, row


def _live_v1ttl(rows: Iterable[Row], now: int) -> Iterator[Live]:
    for row in rows:
        value, expiry, _ = decode_value(ApiVersion.V1TTL, row[1])
        if not expiry or expiry > now:
            yield row[0][1:], value, expiry, row


def _live_v2(rows: Iterable[Row], now: int) -> Iterator[Live]:
    """The first row of each key has the largest timestamp; keys of other modes than raw are not ours."""
    last = b""
    for row in rows:
        key, stored = row
        versionless = key[:-TS_SIZE]
        if versionless == last or not key.startswith(_RAW_START):
            continue
        last = versionless
        if stored.endswith(_NO_FLAGS):  # most rows
            yield _rpc_key(versionless), stored[:-1], 0, row
        else:
            value = decode_value(ApiVersion.V2, stored)
            if value.is_live(now):
                yield _rpc_key(versionless), value.value, value.expire_ts, row


def _rpc_key(versionless: bytes) -> bytes:
    """The RPC key in ``z`` and memcomparable bytes that a store wrote: they need no checks."""
    key = bytearray(versionless[1:])
    padding = FULL - key[-1]
    del key[GROUP::ENCODED_GROUP]
    del key[len(key) - padding :]
    return bytes(key)


_READERS: Final[dict[ApiVersion, Callable[[Iterable[Row], int], Iterator[Live]]]] = {
    ApiVersion.V1: _live_v1,
    ApiVersion.V1TTL: _live_v1ttl,
    ApiVersion.V2: _live_v2,
}


def write_sst(rows: Iterable[Seen], path: Path, options: Options) -> Written | None:
    """Write rows of `Conversion.rows` to an SST at ``path``; None, and no file, when there are none."""
    writer: SstFileWriter | None = None
    crc64xor = total_kvs = total_bytes = 0
    crc64 = fastcrc.crc64.xz
    for rpc, value, row in rows:
        if writer is None:
            writer = SstFileWriter(options)
            writer.open(str(path))
        writer[row[0]] = row[1]
        seen = rpc + value
        crc64xor ^= crc64(seen)
        total_kvs += 1
        total_bytes += len(seen)
    if writer is None:
        return None
    writer.finish()
    return Written(crc64xor, total_kvs, total_bytes)


def sst_options(compression: brpb_pb2.CompressionType.ValueType = brpb_pb2.UNKNOWN, level: int = 0) -> Options:
    """As TiKV writes SSTs for backups; ``compression`` is a ``brpb.CompressionType``, level 0 the default."""
    types = {
        brpb_pb2.UNKNOWN: DBCompressionType.lz4,  # the fastest that is built in
        brpb_pb2.LZ4: DBCompressionType.lz4,
        brpb_pb2.SNAPPY: DBCompressionType.snappy,
        brpb_pb2.ZSTD: DBCompressionType.zstd,
    }
    table = BlockBasedOptions()
    table.set_format_version(_FORMAT_VERSION)
    table.set_checksum_type(ChecksumType.crc32c())
    table.set_block_size(_BLOCK_SIZE)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(types[compression]())
    options.set_compression_options(_WINDOW_BITS, level or _DEFAULT_LEVEL, 0, 0)
    return options
