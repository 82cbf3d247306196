"""How a store rewrites the keys of an SST while it downloads it, and which of them it keeps.

A rule's prefixes are of storage keys without ``z``. The range of the request is in the target's keys; it is carried back
to the file's own keys, which are cut by it before they are rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.keys import MAX_TS, TS_SIZE
from tikv_br.cluster.pb import import_sstpb_pb2


class WrongPrefix(Exception):
    """A key or bound does not begin as the rule wants it; the message is the store's."""

    def __init__(self, what: str, key: bytes, prefix: bytes) -> None:
        super().__init__(f"{what} has wrong prefix: key {key.hex().upper()} does not start with {prefix.hex().upper()}")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule with the range it is used on. Bounds are the file's own keys; ``end`` None is unbounded."""

    old_prefix: bytes
    new_prefix: bytes
    new_timestamp: int
    start: bytes
    end: bytes | None
    end_exclusive: bool

    @classmethod
    def of(cls, rule: import_sstpb_pb2.RewriteRule, meta: import_sstpb_pb2.SSTMeta) -> Rewrite:
        """The rule of a request. Raises `WrongPrefix` when the range is not of the target's prefix."""
        old, new = rule.old_key_prefix, rule.new_key_prefix
        return cls(
            old_prefix=old,
            new_prefix=new,
            new_timestamp=rule.new_timestamp,
            start=_start_of(meta.range.start, old, new),
            end=_end_of(meta.range.end, old, new, exclusive=meta.end_key_exclusive),
            end_exclusive=meta.end_key_exclusive or not meta.range.end,
        )

    @property
    def changes_keys(self) -> bool:
        """Whether keys come out other than they were."""
        return self.old_prefix != self.new_prefix or self.new_timestamp != 0

    def keeps(self, key: bytes) -> bool:
        """Whether a key of the file lies in the range."""
        return self.start <= key and not self.is_past(key)

    def is_past(self, key: bytes) -> bool:
        """Whether a key of the file, and so every later one, lies behind the range."""
        if self.end is None:
            return False
        return key >= self.end if self.end_exclusive else key > self.end

    def apply(self, key: bytes) -> bytes:
        """The key as it is written. Raises `WrongPrefix`."""
        if not key.startswith(self.old_prefix):
            raise WrongPrefix("Key in SST", key, self.old_prefix)
        key = self.new_prefix + key[len(self.old_prefix) :]
        if self.new_timestamp:
            key = key[:-TS_SIZE] + (MAX_TS - self.new_timestamp).to_bytes(TS_SIZE, "big")
        return key


def successor(prefix: bytes) -> bytes:
    """The smallest key above all that begin with ``prefix``; b"" when there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""


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
