"""One region of a backup: its live rows, converted, in one SST written by RocksDB itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import fastcrc
from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options, SstFileWriter

from formats.api_version import ApiVersion
from formats.keys import DATA_PREFIX, RAW_MODE, TS_SIZE, KeyCodec
from formats.values import decode_value, encode_value
from tikv_br.cluster.pb import brpb_pb2

CONVERTED_TS: Final = 1
"""The timestamp of every row that a backup brings from V1 or V1TTL to V2."""
_FORMAT_VERSION: Final = 2
_BLOCK_SIZE: Final = 16 << 10
_WINDOW_BITS: Final = -14
_DEFAULT_LEVEL: Final = 32767

Row = tuple[bytes, bytes]
"""A data key (with ``z``) and the stored value."""


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

    def live_rows(self, rows: Iterable[Row], now: int) -> Iterator[tuple[bytes, Row]]:
        """What a reader of the store would see at ``now``: (RPC key of the target, row of the target).

        ``rows`` are all rows of a range in key order; older versions, tombstones and the expired are left out.
        """
        source, target = KeyCodec(self.source), KeyCodec(self.target)
        for key, value in newest(rows) if source.is_v2 else rows:
            stored = decode_value(self.source, value)
            if not stored.is_live(now):
                continue
            rpc, _ = source.parse_storage_key(key[1:])
            if self.source is self.target:
                if not source.is_v2 or rpc.startswith(RAW_MODE):
                    yield rpc, (key, value)
            else:
                rpc = target.rpc_key(rpc)
                converted = encode_value(self.target, stored)
                yield rpc, (DATA_PREFIX + target.storage_key(rpc, CONVERTED_TS), converted)

    def user_value(self, value: bytes) -> bytes:
        """The value that a client of the target sees in a stored one."""
        return decode_value(self.target, value).value

    def target_range(self, start: bytes, end: bytes) -> tuple[bytes, bytes]:
        """The RPC range of the target that an RPC range of the source becomes."""
        return (start, end) if self.source is self.target else KeyCodec(self.target).rpc_range(start, end)


def newest(rows: Iterable[Row]) -> Iterator[Row]:
    """The first row of each key of API V2: the one with the largest timestamp."""
    last = b""
    for row in rows:
        key = row[0][:-TS_SIZE]
        if key != last:
            last = key
            yield row


def write_sst(
    rows: Iterable[tuple[bytes, Row]], conversion: Conversion, path: Path, options: Options
) -> Written | None:
    """Write rows of `Conversion.live_rows` to an SST at ``path``; None, and no file, when there are none."""
    writer: SstFileWriter | None = None
    crc64xor = total_kvs = total_bytes = 0
    crc64 = fastcrc.crc64.xz
    for rpc, (key, value) in rows:
        if writer is None:
            writer = SstFileWriter(options)
            writer.open(str(path))
        writer[key] = value
        seen = rpc + conversion.user_value(value)
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
