"""A table opened: metaindex, properties and index, without the rows. Plain Python."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst.block import TRAILER_SIZE, BlockReader, Footer, entries, entries_end, extents, read_footer
from tikv_br.formats.sst.coding import BlockHandle, Readable, decode_handle, decode_varint, zigzag
from tikv_br.formats.sst.source import RandomAccess, TailCache, read_exactly

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


def _without_global_seqno(stored: bytes, handle: BlockHandle) -> bytes:
    for name, start, end in extents(stored[: handle.size]):
        if name == GLOBAL_SEQNO.encode():
            return stored[:start] + bytes(end - start) + stored[end:]
    return stored


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise DamagedBytes(f"property named {show_key(name)}") from None


_KEY_TRAILER = 8
_PUT = 1
_TWO_LEVELS = 2
_WITH_FIRST_KEYS = 3
_INDEX_TYPES = range(4)  # 0 and 1 are searched in different ways but read alike


class SstIndex(Struct, frozen=True):
    """Data blocks in file order; `separators` are user keys, one a block, at or after its last key."""

    separators: list[bytes]
    handles: list[BlockHandle]


def read_index(blocks: BlockReader, handle: BlockHandle, properties: Mapping[str, bytes]) -> SstIndex:
    """Read the whole index.

    Raises `DamagedBytes` for keys that do not ascend and for blocks that overlap or reach beyond the start of the
    index, `UnsupportedFormat` for an unknown kind of index.
    """
    kind = fixed_number(properties, INDEX_TYPE)
    if kind not in _INDEX_TYPES:
        raise UnsupportedFormat(f"index of type {kind}")
    decode = partial(
        _decode,
        user_keys=bool(number(properties, INDEX_KEYS_ARE_USER_KEYS)),
        deltas=bool(number(properties, INDEX_VALUES_ARE_DELTAS)),
        first_keys=kind == _WITH_FIRST_KEYS,
    )
    index = _checked(decode(blocks.read(handle)), handle.offset, "index")
    if kind != _TWO_LEVELS:
        return index
    parts = [decode(blocks.read(partition)) for partition in index.handles]
    whole = SstIndex([key for part in parts for key in part.separators], [at for part in parts for at in part.handles])
    data_limit = index.handles[0].offset if index.handles else 0
    return _checked(whole, data_limit, "partitioned index")


def _decode(block: Readable, *, user_keys: bool, deltas: bool, first_keys: bool) -> SstIndex:
    if deltas:
        pairs = list(_delta_entries(bytes(block), with_first_keys=first_keys))
    else:
        pairs = [(key, decode_handle(value)[0]) for key, value in entries(block)]
    if not user_keys and any(len(key) < _KEY_TRAILER for key, _ in pairs):
        raise DamagedBytes("index key shorter than its sequence number")
    return SstIndex([key if user_keys else key[:-_KEY_TRAILER] for key, _ in pairs], [at for _, at in pairs])


def _delta_entries(block: bytes, *, with_first_keys: bool) -> Iterator[tuple[bytes, BlockHandle]]:
    """Entries without a value length: after the key a handle or, where the key shares bytes, a difference of sizes."""
    end = entries_end(block)
    block = block[:end]
    position, key, handle = 0, b"", BlockHandle(0, 0)
    while position < end:
        shared, position = decode_varint(block, position, bits=32)
        unshared, position = decode_varint(block, position, bits=32)
        if shared > len(key) or position + unshared > end:
            raise DamagedBytes(f"index entry at byte {position} reaches beyond its block")
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        if shared:
            difference, position = decode_varint(block, position)
            handle = BlockHandle(handle.offset + handle.size + TRAILER_SIZE, handle.size + zigzag(difference))
        else:
            handle, position = decode_handle(block, position)
        if with_first_keys:
            length, position = decode_varint(block, position, bits=32)
            position += length
        yield key, handle


def _checked(index: SstIndex, limit: int, what: str) -> SstIndex:
    end = 0
    for number, handle in enumerate(index.handles):
        if handle.offset < end or handle.size < 0:
            raise DamagedBytes(f"{what}: block {number} at {handle.offset} starts before the last one ends, at {end}")
        end = handle.offset + handle.size + TRAILER_SIZE
    if end > limit:
        raise DamagedBytes(f"{what}: data reaches to {end}, beyond {limit}")
    if any(left > right for left, right in pairwise(index.separators)):
        raise DamagedBytes(f"{what}: keys do not ascend")
    return index


_READ_SIZE = 4 << 20
"""Bytes that one read fetches of neighbouring blocks, unless a block is larger."""
_INDEX_NAME = "rocksdb.index"
_DICTIONARY_NAME = "rocksdb.compression_dict"
_RANGE_DELETIONS_NAME = "rocksdb.range_del"


class Table:
    """Parts of a table, each fetched by ranged reads on first use.

    Any of them raises `DamagedBytes` or `UnsupportedFormat`. One thread at a time.
    """

    def __init__(self, source: RandomAccess) -> None:
        self.source = TailCache(source)

    @cached_property
    def footer(self) -> Footer:
        """Format version, checksum type and where to go on."""
        return read_footer(self.source)

    @cached_property
    def blocks(self) -> BlockReader:
        return BlockReader(self.source, self.footer)

    @cached_property
    def metaindex(self) -> Mapping[str, BlockHandle]:
        """Blocks that hold no rows, by name."""
        pairs = entries(self.blocks.read(self.footer.metaindex))
        return {name.decode(errors="replace"): decode_handle(value)[0] for name, value in pairs}

    @cached_property
    def properties(self) -> dict[str, bytes]:
        """RocksDB's and TiKV's table properties, undecoded."""
        if BLOCK_NAME not in self.metaindex:
            raise DamagedBytes("table without a block of properties")
        return read_properties(self.blocks, self.metaindex[BLOCK_NAME])

    @cached_property
    def index(self) -> SstIndex:
        """Extent and separator of every data block."""
        handle = self.footer.index or self.metaindex.get(_INDEX_NAME)
        if handle is None:
            raise DamagedBytes("table without an index")
        return read_index(self.blocks, handle, self.properties)

    @property
    def entries(self) -> int:
        """Number of rows according to the properties."""
        return number(self.properties, NUM_ENTRIES)

    def every_block(self) -> list[BlockHandle]:
        """All blocks that the table names, data first, in order. Partitions of an index or a filter, which these name, are missing."""
        data = self.index.handles
        named = {*self.metaindex.values(), self.footer.metaindex, *filter(None, [self.footer.index])}
        others = sorted(named)
        for before, block in pairwise([*data[-1:], *others]):
            if block.offset < before.offset + before.size + TRAILER_SIZE:
                raise DamagedBytes(f"block at {block.offset} starts before the last one ends")
        return [*data, *others]

    def stored(self, run: Sequence[BlockHandle]) -> Iterator[memoryview]:
        """Neighbouring blocks as they lie in the file, each with its trailer, by one read: see `runs`."""
        start, end = run[0].offset, run[-1].offset + run[-1].size + TRAILER_SIZE
        data = memoryview(read_exactly(self.source, start, end - start))
        for offset, size in run:
            yield data[offset - start : offset - start + size + TRAILER_SIZE]

    def rows(self, handle: BlockHandle) -> Iterator[FoundRow]:
        """The rows of a data block. Raises `UnsupportedFormat` for a row that is no put."""
        for internal, value in entries(self.blocks.read(handle)):
            if len(internal) < _KEY_TRAILER:
                raise DamagedBytes(f"row of the block at {handle.offset} has a key without sequence number")
            if internal[-_KEY_TRAILER] != _PUT:
                raise UnsupportedFormat(f"row of type {internal[-_KEY_TRAILER]}: only puts are read")
            yield FoundRow(internal[:-_KEY_TRAILER], value)

    def require_plain_rows(self) -> None:
        """Raise `UnsupportedFormat` where rows cannot be read block by block, each on its own, in order of bytes."""
        comparator = self.properties.get(COMPARATOR, BYTEWISE)
        if comparator != BYTEWISE:
            raise UnsupportedFormat(f"keys ordered by {comparator.decode(errors='replace')}")
        if _DICTIONARY_NAME in self.metaindex:
            raise UnsupportedFormat("blocks compressed with a dictionary")
        if _RANGE_DELETIONS_NAME in self.metaindex or number(self.properties, NUM_RANGE_DELETIONS):
            raise UnsupportedFormat("table with range deletions")


def runs(handles: Iterable[BlockHandle]) -> Iterator[list[BlockHandle]]:
    """Neighbouring blocks that one read fetches: a few MiB, or one block that is larger."""
    run: list[BlockHandle] = []
    for handle in handles:
        if run and handle.offset + handle.size + TRAILER_SIZE - run[0].offset > _READ_SIZE:
            yield run
            run = []
        run.append(handle)
    if run:
        yield run


class FoundRow(NamedTuple):
    """A row as it lies in the table."""

    key: bytes
    value: bytes


class EndKeys(NamedTuple):
    """The first and the last key of a table as in the file: with the ``z`` and, in V2, the timestamp."""

    first: bytes
    last: bytes


def first_row_from(table: Table, key: bytes) -> FoundRow | None:
    """The first row whose key is not below ``key``; None when all are. Reads the tail and one block, rarely two.

    Raises `DamagedBytes`, and `UnsupportedFormat` for a row that is no put.
    """
    table.require_plain_rows()
    index = table.index
    for handle in index.handles[bisect_left(index.separators, key) :]:
        for row in table.rows(handle):
            if row.key >= key:
                return row
    return None
