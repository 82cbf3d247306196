"""Requests of RawBatchPut and RawBatchDelete, from Arrow columns straight to the bytes on the wire.

Fields of one message may be put one after the other, so what is made here goes behind a serialized request that has
nothing but its context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from formats.errors import FormatError
from formats.sst.coding import encode_varint

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.columns import Numbers

TAG_TTLS = b"\x32"  # RawBatchPutRequest.ttls = 6, packed


class Puts:
    """Rows that are put, from which any part can be taken. Both columns are checked once, here (`formats.columns.view`)."""

    def __init__(self, prefix: bytes, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray) -> None:
        """Each key goes with the prefix in front. Raises `FormatError` for columns of different lengths."""
        from formats import columns

        if len(keys) != len(values):
            raise FormatError(f"{len(keys)} keys with {len(values)} values")
        self._prefix = columns.from_bytes(prefix)
        self._keys, self._values = columns.view(keys), columns.view(values)
        self.sizes = np.diff(self._keys[0]) + np.diff(self._values[0]) + len(prefix)
        """Bytes of each row's RPC key and value, shape (rows,)."""

    def fields(self, first: int, stop: int, ttls: Numbers | None = None) -> bytes:
        """The pairs [first, stop), which must lie within the rows, and their TTLs, shape (stop - first,), if any."""
        from formats.kernels import rawput as kernels

        pairs = kernels.pairs(*self._keys, *self._values, self._prefix, first, stop)
        if ttls is None or not len(ttls):
            return pairs.tobytes()
        packed = kernels.packed(ttls)
        return b"".join((pairs.data, TAG_TTLS, encode_varint(len(packed)), packed.data))


class Deletes:
    """Keys that are deleted, from which any part can be taken."""

    def __init__(self, prefix: bytes, keys: pa.LargeBinaryArray) -> None:
        """Each key goes with the prefix in front."""
        from formats import columns

        self._prefix = columns.from_bytes(prefix)
        self._keys = columns.view(keys)
        self.sizes = np.diff(self._keys[0]) + len(prefix)
        """Bytes of each RPC key, shape (rows,)."""

    def fields(self, first: int, stop: int) -> bytes:
        """The keys [first, stop), which must lie within the rows."""
        from formats.kernels import rawput as kernels

        return kernels.names(*self._keys, self._prefix, first, stop).tobytes()
