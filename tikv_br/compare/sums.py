"""The checksums that stores may answer for rows of which some expire.

A store counts the rows that are alive by its own clock, at one moment for each region and request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from tikv_br.backupset.files import Expiry, FileEntry
from tikv_br.formats.checksum import Checksum, checksum

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.columns import Flags


class RangeSums(NamedTuple):
    """A cluster's checksum of a range, and between which seconds of the stores' clocks it was computed."""

    sums: Checksum
    first: int
    last: int


class RecordedSums(NamedTuple):
    """The checksum of rows that a backup records, and of those among them that expire."""

    everything: Checksum
    expiry: Expiry = Expiry()

    @classmethod
    def of(cls, file: FileEntry) -> Self:
        """Those of a file."""
        return cls(Checksum(file.crc64xor, file.total_kvs, file.total_bytes), file.expiry)

    def possible(self, first: int, last: int) -> list[Checksum]:
        """The checksums that a cluster with these rows may answer between two seconds since the epoch.

        That of all rows before the first expires, that of the lasting rows after the last has expired; none in between.
        """
        everything, expiry = self
        if not expiry.total_kvs or expiry.earliest > last:
            return [everything]
        if expiry.latest > first:
            return []
        lasting = Checksum(
            everything.crc64xor ^ expiry.crc64xor,
            everything.total_kvs - expiry.total_kvs,
            everything.total_bytes - expiry.total_bytes,
        )
        return [lasting]


def live_sums(rows: pa.RecordBatch, prefix: bytes, first: int, last: int) -> list[Checksum]:
    """The checksums that rows of ``SCHEMA`` have from second ``first`` to ``last``, newest first; not empty.

    One row per key, no tombstones. ``prefix`` turns their keys into RPC keys. A row with expiry ``e`` lives at all seconds before ``e``.
    """
    import numpy as np

    from tikv_br.formats import columns

    expire_ts = columns.numbers(rows["expire_ts"])
    alive = _checksum(rows, prefix, (expire_ts == 0) | (expire_ts > last))
    found = [alive]
    for second in np.unique(expire_ts[(expire_ts > max(first, 0)) & (expire_ts <= last)])[::-1]:
        alive += _checksum(rows, prefix, expire_ts == second)
        found.append(alive)
    return found


def _checksum(rows: pa.RecordBatch, prefix: bytes, wanted: Flags) -> Checksum:
    import pyarrow as pa

    chosen = rows if wanted.all() else rows.filter(pa.array(wanted))
    return checksum(chosen["key"], chosen["value"], prefix)
