"""Rewrites of key prefixes: which keys of a backup are restored, and under which prefix.

All keys here are RPC keys. Stores rewrite while they fetch a file (`RewriteRule`), on keys as they lie in RocksDB; the
encoding of API V2 works in groups of eight bytes, so there the prefixes' lengths must be equal, or differ by whole groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import GROUP, KeyCodec, successor
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

if TYPE_CHECKING:
    import pyarrow as pa


class Rewrite(Struct, frozen=True):
    """Keys that begin with ``old`` in the backup begin with ``new`` in the cluster. By default nothing changes."""

    source: KeyRange = EVERY_KEY
    """All keys with ``old``."""
    target: KeyRange = EVERY_KEY
    """All keys with ``new``."""

    @classmethod
    def of(cls, source: KeyCodec, old: bytes, target: KeyCodec, new: bytes) -> Rewrite:
        """Build a rewrite from a prefix of ``source``'s user keys to one of ``target``'s."""
        return cls(_all_with(source, old), _all_with(target, new))

    @property
    def old(self) -> bytes:
        """The prefix in the backup."""
        return self.source.start

    @property
    def new(self) -> bytes:
        """The prefix in the cluster."""
        return self.target.start

    @property
    def changes(self) -> bool:
        return self.old != self.new

    @property
    def reversed(self) -> Rewrite:
        """The rewrite of keys in the cluster to keys in the backup."""
        return Rewrite(self.target, self.source)

    def range(self, span: KeyRange) -> KeyRange:
        """Map a non-empty range of `source` to the range of the same keys in the cluster."""
        if not self.changes:
            return span
        within = bool(span.end) and span.end.startswith(self.old)
        end = self._key(span.end) if within else self.target.end
        return KeyRange(self._key(span.start), end)

    def storage_range(self, codec: KeyCodec, target: KeyRange) -> KeyRange:
        """Return a range of the cluster for requests with a rewrite: encoded, without ``z`` and timestamp.

        If the range ends with the prefix, stores accept only the successor of the encoded prefix as its end.
        """
        if self.changes and target.end == self.target.end:
            return KeyRange(codec.bound(target.start), successor(encoded_prefix(codec.api_version, self.new)))
        return KeyRange(codec.bound(target.start), codec.bound(target.end))

    def lacks_end(self, target: KeyRange) -> bool:
        """Return whether a range of the cluster has no end that stores accept with this rewrite: no key is above all those with `new`."""
        return self.changes and bool(self.new) and not target.end

    def apply(self, records: pa.RecordBatch, source: KeyCodec, target: KeyCodec) -> pa.RecordBatch:
        """Records of ``SCHEMA`` with user keys of ``source``: those it is about, with user keys of ``target``."""
        import pyarrow.compute as pc

        old, new = source.user_key(self.old or source.prefix), target.user_key(self.new or target.prefix)
        if old == new == b"":
            return records
        kept = records.filter(pc.starts_with(records["key"], old)) if old else records
        keys = pc.binary_replace_slice(kept["key"], 0, len(old), new)
        return kept.set_column(0, kept.schema.field("key"), keys)

    def _key(self, key: bytes) -> bytes:
        return self.new + key[len(self.old) :]


UNCHANGED = Rewrite()
"""Keys are called in the cluster as in the backup."""


def _all_with(codec: KeyCodec, prefix: bytes) -> KeyRange:
    """Return the RPC range of a prefix of user keys; without a successor it ends with the keyspace."""
    return codec.rpc_range(KeyRange(prefix, successor(prefix)))


def can_stores_rewrite(api_version: ApiVersion, rewrite: Rewrite) -> bool:
    """Return whether stores support the rewrite: in API V2 the rest of each key must keep its place in the groups."""
    return api_version is not ApiVersion.V2 or (len(rewrite.old) - len(rewrite.new)) % GROUP == 0


def encoded_prefix(api_version: ApiVersion, prefix: bytes) -> bytes:
    """Return the common prefix of the storage keys of all RPC keys with ``prefix``."""
    if api_version is not ApiVersion.V2:
        return prefix
    whole = len(prefix) - len(prefix) % GROUP
    groups = (prefix[at : at + GROUP] + b"\xff" for at in range(0, whole, GROUP))
    return b"".join(groups) + prefix[whole:]
