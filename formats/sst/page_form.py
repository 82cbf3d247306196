"""How the pairs of a scan become rows of a table, from one API version to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formats.api_version import ApiVersion
from formats.columns import Bytes, Flags
from formats.kernels.addresses import Int
from formats.keys import DATA_PREFIX, MAX_TS, TS_SIZE, KeyCodec
from formats.rawscan import RawPage
from formats.sst import encode_page as kernels
from formats.sst.encode import Blocks
from formats.sst.pack import Packing
from formats.values import EXPIRE_SIZE

_VALUE_ZEROS = {ApiVersion.V1: 0, ApiVersion.V1TTL: EXPIRE_SIZE, ApiVersion.V2: 1}
"""Bytes behind the values of rows that neither expire nor are deleted."""


@dataclass(frozen=True)
class PageForm:
    """Says what `to_storage` of the records in a page would be, for rows without expiry."""

    source: KeyCodec
    """Of the page's RPC keys."""
    target: KeyCodec
    ts: int = 1
    """Of every row, where the target is API V2; not 0."""

    def storage_key(self, rpc_key: bytes) -> bytes:
        """The row's key for an RPC key. Raises `DamagedBytes` when that is of another keyspace."""
        return DATA_PREFIX + self.target.storage_key(self.target.rpc_key(self.source.user_key(rpc_key)), self.ts)

    def longest_key(self, page: RawPage) -> int:
        """The most bytes that a row's key can have."""
        return int(kernels.largest_key(page.longest_key))

    def encode(self, blocks: Blocks, packing: Packing, data: Bytes, folded: Bytes, odd: Flags) -> Int:
        """Run `encode_page`."""
        return kernels.encode_page(blocks, packing, data, self._form, folded, odd)

    @cached_property
    def _form(self) -> kernels.Form:
        return kernels.Form(
            source_prefix=_word(self.source.prefix),
            source_prefix_size=len(self.source.prefix),
            memcomparable=self.target.is_v2,
            target_prefix=_word(self.target.prefix),
            key_tail=_word((MAX_TS - self.ts).to_bytes(TS_SIZE, "big")),
            value_zeros=_VALUE_ZEROS[self.target.api_version],
        )


def _word(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(data, "little"))
