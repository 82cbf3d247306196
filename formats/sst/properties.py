"""Table properties: names, and the block that holds them."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from formats.errors import DamagedBytes
from formats.sst.block import BlockReader, encode_entries, entries, extents
from formats.sst.coding import BlockHandle, decode_varint, encode_varint

BLOCK_NAME = "rocksdb.properties"

COMPARATOR = "rocksdb.comparator"
BYTEWISE = b"leveldb.BytewiseComparator"
DATA_SIZE = "rocksdb.data.size"
DELETED_KEYS = "rocksdb.deleted.keys"
EXTERNAL_VERSION = "rocksdb.external_sst_file.version"
GLOBAL_SEQNO = "rocksdb.external_sst_file.global_seqno"
INDEX_KEYS_ARE_USER_KEYS = "rocksdb.index.key.is.user.key"
INDEX_SIZE = "rocksdb.index.size"
INDEX_TYPE = "rocksdb.block.based.table.index.type"
INDEX_VALUES_ARE_DELTAS = "rocksdb.index.value.is.delta.encoded"
MERGE_OPERANDS = "rocksdb.merge.operands"
NUM_DATA_BLOCKS = "rocksdb.num.data.blocks"
NUM_ENTRIES = "rocksdb.num.entries"
NUM_RANGE_DELETIONS = "rocksdb.num.range-deletions"
RAW_KEY_SIZE = "rocksdb.raw.key.size"
RAW_VALUE_SIZE = "rocksdb.raw.value.size"
TAIL_START = "rocksdb.tail.start.offset"
_NO_COLUMN_FAMILY = 0x7FFFFFFF


def read_properties(blocks: BlockReader, handle: BlockHandle) -> dict[str, bytes]:
    """Read and check the block of properties. Raises `DamagedBytes`.

    A store may have written a global sequence number into the file when it ingested it: the checksum still covers the
    zero that was there before, while the number is what counts.
    """
    stored = bytes(blocks.stored(handle))
    if not blocks.is_sound(stored, handle):
        blocks.unpack(_without_global_seqno(stored, handle), handle)
    return {_text(name): value for name, value in entries(blocks.decompress(stored, handle))}


def number(properties: Mapping[str, bytes], name: str) -> int:
    """A property that is a varint; 0 when it is absent, as in RocksDB. Raises `DamagedBytes`."""
    return decode_varint(properties[name])[0] if name in properties else 0


def fixed_number(properties: Mapping[str, bytes], name: str) -> int:
    """A property of fixed width, little endian; 0 when it is absent."""
    return int.from_bytes(properties.get(name, b""), "little")


def encode_properties(
    varints: Mapping[str, int], *, compression: str, index_of_user_keys: bool, index_of_deltas: bool
) -> bytes:
    """The block of an ingestible table without a filter; `varints` are the sizes and counts.

    Session, file number and host are left out on purpose: stores derive cache keys from them, and two files must never
    share one.
    """
    properties = {name: encode_varint(count) for name, count in varints.items()} | {
        COMPARATOR: BYTEWISE,
        EXTERNAL_VERSION: struct.pack("<I", 2),
        GLOBAL_SEQNO: bytes(8),
        INDEX_KEYS_ARE_USER_KEYS: encode_varint(index_of_user_keys),
        INDEX_TYPE: struct.pack("<I", 0),
        INDEX_VALUES_ARE_DELTAS: encode_varint(index_of_deltas),
        "rocksdb.block.based.table.prefix.filtering": b"0",
        "rocksdb.block.based.table.whole.key.filtering": b"1",
        "rocksdb.column.family.id": encode_varint(_NO_COLUMN_FAMILY),
        "rocksdb.compression": compression.encode(),
        "rocksdb.creation.time": encode_varint(0),
        "rocksdb.filter.size": encode_varint(0),
        "rocksdb.fixed.key.length": encode_varint(0),
        "rocksdb.format.version": encode_varint(0),
        "rocksdb.merge.operator": b"nullptr",
        "rocksdb.oldest.key.time": encode_varint(0),
        "rocksdb.prefix.extractor.name": b"nullptr",
        "rocksdb.property.collectors": b"[]",
        DELETED_KEYS: encode_varint(0),
        MERGE_OPERANDS: encode_varint(0),
        NUM_RANGE_DELETIONS: encode_varint(0),
    }
    return encode_entries((name.encode(), value) for name, value in sorted(properties.items()))


def _without_global_seqno(stored: bytes, handle: BlockHandle) -> bytes:
    for name, start, end in extents(stored[: handle.size]):
        if name == GLOBAL_SEQNO.encode():
            return stored[:start] + bytes(end - start) + stored[end:]
    return stored


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise DamagedBytes(f"property named {name.hex()}") from None
