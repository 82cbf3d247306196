"""Rewrite rules of downloads: other prefixes and timestamps for the keys of an SST, of which only a range is kept."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.formats.keys.codec import MAX_TS, TS_SIZE, successor
from tikv_br.playground.encoding import from_memcomparable, memcomparable


class RewriteFault(Exception):
    """A key or bound cannot be rewritten; the message is the store's."""


class WrongPrefix(RewriteFault):
    """A key or bound lacks the rule's prefix."""

    def __init__(self, what: str, key: bytes, prefix: bytes) -> None:
        super().__init__(f"{what} has wrong prefix: key {key.hex().upper()} does not start with {prefix.hex().upper()}")


@dataclass(frozen=True, slots=True)
class RangeRewrite:
    """A rule with the range it is used on. Bounds are the file's own keys; ``end`` None is unbounded."""

    is_plain: bool
    """The prefixes are those of plain keys (request type ``Keyspace``), not of the file's encoded keys."""
    old_prefix: bytes
    new_prefix: bytes
    new_timestamp: int
    start: bytes
    end: bytes | None
    end_exclusive: bool

    @classmethod
    def of(
        cls, rule: import_sstpb_pb2.RewriteRule, meta: import_sstpb_pb2.SSTMeta, *, is_plain: bool = False
    ) -> RangeRewrite:
        """The rule of a request. Raises `WrongPrefix` when the range is not of the target's prefix."""
        old, new = rule.old_key_prefix, rule.new_key_prefix
        start = _start_of(meta.range.start, old, new)
        end = _end_of(meta.range.end, old, new, exclusive=meta.end_key_exclusive)
        if is_plain:
            start, end = memcomparable(start), end and memcomparable(end)
        return cls(
            is_plain=is_plain,
            old_prefix=old,
            new_prefix=new,
            new_timestamp=rule.new_timestamp,
            start=start,
            end=end,
            end_exclusive=meta.end_key_exclusive or not meta.range.end,
        )

    @property
    def changes_keys(self) -> bool:
        """Return whether the rewrite changes any key of a file."""
        return self.old_prefix != self.new_prefix or self.new_timestamp != 0

    def keeps(self, key: bytes) -> bool:
        """Return whether a key of the file is in the range."""
        return self.start <= key and not self.is_past(key)

    def is_past(self, key: bytes) -> bool:
        """Return whether a key of the file, and so every later one, is after the range."""
        if self.end is None:
            return False
        return key >= self.end if self.end_exclusive else key > self.end

    def apply(self, key: bytes) -> bytes:
        """The rewritten key. Raises `RewriteFault`."""
        if self.is_plain:
            user_key, ts = from_memcomparable(key[:-TS_SIZE]), key[-TS_SIZE:]
            if user_key is None:
                raise RewriteFault(f"Codec error: bad padding in key {key.hex().upper()}")
            key = memcomparable(self._exchange_prefix(user_key)) + ts
        else:
            key = self._exchange_prefix(key)
        if self.new_timestamp:
            key = key[:-TS_SIZE] + (MAX_TS - self.new_timestamp).to_bytes(TS_SIZE, "big")
        return key

    def _exchange_prefix(self, key: bytes) -> bytes:
        if not key.startswith(self.old_prefix):
            raise WrongPrefix("Key in SST", key, self.old_prefix)
        return self.new_prefix + key[len(self.old_prefix) :]


def _start_of(start: bytes, old: bytes, new: bytes) -> bytes:
    if not start:
        return old if not new else b""
    if not start.startswith(new):
        raise WrongPrefix("SST start range", start, new)
    return old + start[len(new) :]


def _end_of(end: bytes, old: bytes, new: bytes, *, exclusive: bool) -> bytes | None:
    if not end:
        return (successor(old) or None) if not new else None
    if end.startswith(new):
        return old + end[len(new) :]
    # Apart from keys of the prefix, a store takes the prefix's exact successor, and only that: not its memcomparable form.
    if exclusive and end == successor(new):
        return successor(old) or None
    raise WrongPrefix("SST end range", end, new)
