"""The block of properties. RocksDB reads ours in test_writer; TiKV's are read in the golden tests."""

from __future__ import annotations

import pytest

from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.block import BlockReader, ChecksumType, Footer, encode_entries, entries
from tikv_br.formats.sst.coding import BlockHandle
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.writer import encode_properties


def test_no_identity() -> None:
    """Nothing from which a store would make the same cache key for two files is written."""
    block = encode_properties({}, compression="", index_of_user_keys=False, index_of_deltas=False)
    assert not [name for name, _ in entries(block) if b"identity" in name or b"file.number" in name]


def test_absent() -> None:
    """Missing properties count as 0."""
    assert names.number({}, names.NUM_ENTRIES) == names.fixed_number({}, names.GLOBAL_SEQNO) == 0


def test_names_that_are_no_text() -> None:
    """A name that is no UTF-8 is damage."""
    block = encode_entries([(b"\xff", b"")]) + bytes(5)
    handle = BlockHandle(0, len(block) - 5)
    blocks = BlockReader(MemorySource(block), Footer(2, ChecksumType.NONE, handle, handle))
    with pytest.raises(DamagedBytes, match="property named ff"):
        names.read_properties(blocks, handle)
