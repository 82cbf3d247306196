"""SSTs that RocksDB wrote, and what a careless or wicked hand makes of them. No code of ours reads or writes them here.

The layout of a block-based table, as far as it is needed: blocks, each followed by a type byte and a masked crc32c; a
metaindex block that names the properties block; a footer of 53 bytes at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import fastcrc
from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options, SstFileWriter

from tikv_br.formats.sst.block import TRAILER_SIZE
from tikv_br.formats.sst.table import Table

FOOTER_SIZE = 53
_TRAILER = 5
Handle = tuple[int, int]
"""Offset and size of a block."""


def write_sst(path: Path, rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Write rows in one uncompressed block with whole keys, and return the file."""
    table = BlockBasedOptions()
    table.set_format_version(2)
    table.set_checksum_type(ChecksumType.crc32c())
    table.set_block_size(1 << 24)
    table.set_block_restart_interval(1)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.none())
    writer = SstFileWriter(options)
    writer.open(str(path))
    for key, value in rows:
        writer[key] = value
    writer.finish()
    return path.read_bytes()


def exchange_keys(data: bytes, one: bytes, other: bytes) -> bytes:
    """Exchange two keys of equal length in the data block, so that rows are no longer sorted; checksums are right."""
    assert len(one) == len(other)
    size = _first_block(data)
    block = data[:size].replace(one, b"\0" * len(one), 1).replace(other, one, 1).replace(b"\0" * len(one), other, 1)
    return _sealed(block) + data[size + _TRAILER :]


def flip(data: bytes, at: int) -> bytes:
    """Flip one bit of the byte at an offset."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def without_properties(data: bytes, *names: str) -> bytes:
    """Leave out table properties: new properties and metaindex blocks are put behind the old ones."""
    footer = data[-FOOTER_SIZE:]
    metaindex, position = _handle(footer, 1)
    index, _ = _handle(footer, position)
    meta = dict(_entries(_block(data, metaindex)))
    properties = _entries(_block(data, _handle(meta[b"rocksdb.properties"], 0)[0]))
    kept = [(name, value) for name, value in properties if name.decode() not in names]
    assert len(kept) == len(properties) - len(names)
    body = data[:-FOOTER_SIZE]
    block = _build(kept)
    meta[b"rocksdb.properties"] = _varint(len(body)) + _varint(len(block) - _TRAILER)
    new_meta = _build(sorted(meta.items()))
    handles = _varint(len(body) + len(block)) + _varint(len(new_meta) - _TRAILER) + b"".join(map(_varint, index))
    return body + block + new_meta + footer[:1] + handles.ljust(40, b"\0") + footer[-12:]


def _first_block(data: bytes) -> int:
    """The size of the block at offset 0: the first whose checksum fits."""
    for size in range(1, len(data) - _TRAILER):
        if data[size] == 0 and data[size : size + _TRAILER] == _sealed(data[:size])[size:]:
            return size
    raise AssertionError("no block at the start")


def _sealed(block: bytes) -> bytes:
    """An uncompressed block with its trailer."""
    block += b"\0"
    crc = fastcrc.crc32.iscsi(block)
    return block + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _block(data: bytes, handle: Handle) -> bytes:
    offset, size = handle
    assert data[offset + size] == 0, "a compressed block"
    return data[offset : offset + size]


def _entries(block: bytes) -> list[tuple[bytes, bytes]]:
    restarts = struct.unpack("<I", block[-4:])[0]
    end = len(block) - 4 - 4 * restarts
    position, key, found = 0, b"", []
    while position < end:
        shared, position = _parse_varint(block, position)
        fresh, position = _parse_varint(block, position)
        size, position = _parse_varint(block, position)
        key = key[:shared] + block[position : position + fresh]
        position += fresh
        found.append((key, block[position : position + size]))
        position += size
    return found


def _build(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    body, restarts = b"", []
    for key, value in entries:
        restarts.append(len(body))
        body += _varint(0) + _varint(len(key)) + _varint(len(value)) + key + value
    return _sealed(body + b"".join(struct.pack("<I", each) for each in [*restarts, len(restarts)]))


def _handle(data: bytes, position: int) -> tuple[Handle, int]:
    offset, position = _parse_varint(data, position)
    size, position = _parse_varint(data, position)
    return (offset, size), position


def _parse_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def tail_offset(table: Table) -> int:
    """End of the last data block: filter, index, properties and footer follow."""
    last = table.index.handles[-1]
    return last.offset + last.size + TRAILER_SIZE
