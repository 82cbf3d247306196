"""A table opened: footer, metaindex, properties and index. Everything but the rows, in plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from formats.errors import DamagedBytes, UnsupportedFormat
from formats.sst import properties as names
from formats.sst.block import BlockReader, entries
from formats.sst.coding import BlockHandle, decode_handle
from formats.sst.footer import Footer, read_footer
from formats.sst.index import Index, read_index
from formats.sst.source import RandomAccess, TailCache

_INDEX_NAME = "rocksdb.index"
_DICTIONARY_NAME = "rocksdb.compression_dict"
_RANGE_DELETIONS_NAME = "rocksdb.range_del"


class Table:
    """Each part is read by ranged reads when it is first asked for.

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
        """What reads this table's blocks."""
        return BlockReader(self.source, self.footer)

    @cached_property
    def metaindex(self) -> Mapping[str, BlockHandle]:
        """Blocks that hold no rows, by name."""
        pairs = entries(self.blocks.read(self.footer.metaindex))
        return {name.decode(errors="replace"): decode_handle(value)[0] for name, value in pairs}

    @cached_property
    def properties(self) -> dict[str, bytes]:
        """RocksDB's and TiKV's table properties, undecoded."""
        if names.BLOCK_NAME not in self.metaindex:
            raise DamagedBytes("table without a block of properties")
        return names.read_properties(self.blocks, self.metaindex[names.BLOCK_NAME])

    @cached_property
    def index(self) -> Index:
        """Every data block's extent and separator."""
        handle = self.footer.index or self.metaindex.get(_INDEX_NAME)
        if handle is None:
            raise DamagedBytes("table without an index")
        return read_index(self.blocks, handle, self.properties)

    @property
    def entries(self) -> int:
        """How many rows the properties say there are."""
        return names.number(self.properties, names.NUM_ENTRIES)

    @property
    def global_seqno(self) -> int:
        """The sequence number of all rows, given at ingestion; 0 = each row has its own."""
        return names.fixed_number(self.properties, names.GLOBAL_SEQNO)

    @property
    def tail_offset(self) -> int:
        """Where the last data block ends: filter, index, properties and footer follow."""
        return self.index.data_end

    def require_plain_rows(self) -> None:
        """Raise `UnsupportedFormat` where rows cannot be read block by block, each on its own, in order of bytes."""
        comparator = self.properties.get(names.COMPARATOR, names.BYTEWISE)
        if comparator != names.BYTEWISE:
            raise UnsupportedFormat(f"keys ordered by {comparator.decode(errors='replace')}")
        if _DICTIONARY_NAME in self.metaindex:
            raise UnsupportedFormat("blocks compressed with a dictionary")
        if _RANGE_DELETIONS_NAME in self.metaindex or names.number(self.properties, names.NUM_RANGE_DELETIONS):
            raise UnsupportedFormat("table with range deletions")


def tail_extent(source: RandomAccess) -> int:
    """Where the tail of a table starts: all that follows its last data block.

    A hash from here to the end identifies the table without reading its rows: the index holds every block's extent.
    Raises `DamagedBytes`, `UnsupportedFormat`.
    """
    return Table(source).tail_offset
