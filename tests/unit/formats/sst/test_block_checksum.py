"""What a block's offset does to its checksum. RocksDB verifies checksums in test_writer, and makes them in test_reader."""

from __future__ import annotations

from tikv_br.formats.sst.block import context_modifier


def test_context() -> None:
    """A block at another offset has another modifier, beyond 4 GiB too; without a base there is none."""
    assert context_modifier(0, 12345) == 0
    assert len({context_modifier(99, offset) for offset in (0, 1, 1 << 20, 1 << 32, 5 << 32)}) == 4
    assert context_modifier(99, 1) == context_modifier(99, 1 << 32)
    assert context_modifier(0xFFFFFFFF, (1 << 40) + 1) < 1 << 32
