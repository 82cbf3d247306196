"""Pages of RawScan: measured as received, split into Arrow columns when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.columns import Bytes


class ScanPage(Struct, frozen=True):
    """Result of one RawScan: RPC keys and user values, ascending by key; two columns of equal length."""

    keys: pa.LargeBinaryArray
    values: pa.LargeBinaryArray


class RawPage(Struct, frozen=True):
    """The same as it came over the wire, proven to hold well-formed pairs and nothing else."""

    data: Bytes
    """Serialized ``kvrpcpb.RawScanResponse``; must not be modified."""
    rows: int
    key_bytes: int
    value_bytes: int
    longest_key: int
    longest: int
    """Bytes of the longest key and value together."""
    first_key: bytes
    """RPC key, as `last_key`; both empty without rows."""
    last_key: bytes

    def split(self) -> ScanPage:
        """The columns, which own their memory."""
        from tikv_br.formats import columns
        from tikv_br.formats.kernels import rawscan as kernels

        key_offsets, keys, value_offsets, values = kernels.split(self.data, self.rows, self.key_bytes, self.value_bytes)
        return ScanPage(columns.build(key_offsets, keys), columns.build(value_offsets, values))


def measure(response: bytes) -> RawPage | None:
    """Parse a serialized ``kvrpcpb.RawScanResponse``; None if it contains anything but well-formed pairs.

    A region error, an error in a pair, an unknown field, an unusual order or damaged bytes all give None: protobuf then
    finds the cause.
    """
    from tikv_br.formats import columns
    from tikv_br.formats.kernels import rawscan as kernels

    data = columns.from_bytes(response)
    rows, key_bytes, value_bytes, longest_key, longest, first, last = kernels.measure(data)
    if rows == kernels.NOT_THERE:
        return None
    return RawPage(
        data=data,
        rows=int(rows),
        key_bytes=int(key_bytes),
        value_bytes=int(value_bytes),
        longest_key=int(longest_key),
        longest=int(longest),
        first_key=response[first[0] : sum(first)],
        last_key=response[last[0] : sum(last)],
    )


def parse(response: bytes) -> ScanPage | None:
    """The columns of what `measure` finds."""
    page = measure(response)
    return None if page is None else page.split()
