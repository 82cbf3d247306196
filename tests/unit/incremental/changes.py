"""Changes for tests, as tuples and as batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from tikv_br.formats.columns import SCHEMA


class Change(NamedTuple):
    """One row of a feed."""

    ts: int
    key: bytes
    value: bytes = b""
    expire_ts: int = 0
    deleted: bool = False


def batch(changes: Sequence[Change]) -> pa.RecordBatch:
    """Rows of `SCHEMA`."""
    return pa.RecordBatch.from_pylist([change._asdict() for change in changes], schema=SCHEMA)


def changes(batches: Iterable[pa.RecordBatch]) -> list[Change]:
    """The rows of batches, in order."""
    return [Change(**row) for each in batches for row in each.to_pylist()]
