"""RocksDB block-based tables (SST files) to and from Arrow batches.

Names are imported on first use, so that a process that only checks a table's structure does not load the compiler.

Modules, in reading order:

- `source`, `coding`, `compression`, `block`: ranged reads, varints, compression, footer and blocks
- `table`: an opened table: properties, index, and the lookup of one row
- `reader`, `decode`: rows of a table as Arrow batches, and the kernel for blocks
- `check`, `row_check`: whether a store can ingest a table, by its structure and by its rows
- `writer`, `encode`: writes tables, and the kernels that fill blocks from rows and RawScan pages
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tikv_br.formats.sst.check import SstFacts, check_structure
    from tikv_br.formats.sst.compression import Compression
    from tikv_br.formats.sst.reader import SstReader
    from tikv_br.formats.sst.row_check import check_rows
    from tikv_br.formats.sst.source import MemorySource, RandomAccess
    from tikv_br.formats.sst.table import Table, tail_extent
    from tikv_br.formats.sst.writer import SstOptions, SstSummary, SstWriter

_MODULES = {
    "Compression": "compression",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
