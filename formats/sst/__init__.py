"""RocksDB block-based tables (SST files) to and from Arrow batches.

Bytes of one file at a time; no storage client, no knowledge of backups. Names are imported on first use, so that a
process which only looks at a table's structure does not load the compiler for rows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.sst.check import SstFacts, check_structure
    from formats.sst.compression import Compression
    from formats.sst.reader import InternalRow, SstReader
    from formats.sst.row_check import check_rows
    from formats.sst.source import MemorySource, RandomAccess
    from formats.sst.table import Table, tail_extent
    from formats.sst.writer import SstOptions, SstSummary, SstWriter

_HOMES = {
    "Compression": "compression",
    "InternalRow": "reader",
    "MemorySource": "source",
    "RandomAccess": "source",
    "SstFacts": "check",
    "SstOptions": "writer",
    "SstReader": "reader",
    "SstSummary": "writer",
    "SstWriter": "writer",
    "Table": "table",
    "check_rows": "row_check",
    "check_structure": "check",
    "tail_extent": "table",
}

__all__ = [
    "Compression",
    "InternalRow",
    "MemorySource",
    "RandomAccess",
    "SstFacts",
    "SstOptions",
    "SstReader",
    "SstSummary",
    "SstWriter",
    "Table",
    "check_rows",
    "check_structure",
    "tail_extent",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
