"""Pages of RawScan, from the bytes of the response straight into Arrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ScanPage:
    """What one RawScan returned: RPC keys and user values, ascending by key; two columns of equal length."""

    keys: pa.LargeBinaryArray
    values: pa.LargeBinaryArray


def parse(response: bytes) -> ScanPage | None:
    """The pairs of a serialized ``kvrpcpb.RawScanResponse``; nothing when it holds anything but well-formed pairs.

    A region error, an error in a pair, an unknown field, an unusual order or damaged bytes all give None: protobuf then
    says which. The page owns its memory.
    """
    from formats import columns
    from formats.kernels import rawscan as kernels

    data = columns.from_bytes(response)
    pairs, key_bytes, value_bytes = kernels.measure(data)
    if pairs == kernels.NOT_THERE:
        return None
    key_offsets, keys, value_offsets, values = kernels.split(data, pairs, key_bytes, value_bytes)
    return ScanPage(columns.build(key_offsets, keys), columns.build(value_offsets, values))
