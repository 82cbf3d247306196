"""The report of a comparison: the ranges and keys that differ, and the numbers of requests."""

from __future__ import annotations

import enum
import operator
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs

from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange


class DifferenceKind(enum.StrEnum):
    """Kind of difference of a key. A is the reference, B is compared with it."""

    ONLY_A = "only_a"
    ONLY_B = "only_b"
    VALUE = "value"


class KeyDifference(NamedTuple):
    """Difference of one key."""

    kind: DifferenceKind
    key: bytes
    expires_in: int = 0
    """Seconds until the key expires on the one side that has it; 0 = never, or not requested."""


class Counts(Struct, frozen=True):
    """Number of different keys by kind."""

    only_a: int = 0
    only_b: int = 0
    value: int = 0
    expiring: int = 0
    """Keys on one side only that have expired or are about to. They do not count as different."""

    @property
    def total(self) -> int:
        """All different keys."""
        return self.only_a + self.only_b + self.value

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, structs.astuple(self), structs.astuple(other)))


class DifferentRange(NamedTuple):
    """A small range of user keys in which something differs."""

    span: KeyRange
    counts: Counts


class Meter(Struct):
    """Number and size of requests to the clusters."""

    checksums: int = 0
    """Number of RawChecksum requests."""
    scans: int = 0
    """RawScan pages, and single reads."""
    scanned_bytes: int = 0
    """Bytes of keys and values in them."""

    def add(self, other: Meter) -> None:
        """Add the figures of another."""
        self.checksums += other.checksums
        self.scans += other.scans
        self.scanned_bytes += other.scanned_bytes


class Report(Struct):
    """Result of comparisons; reports can be added."""

    counts: Counts = msgspec.field(default_factory=Counts)
    ranges: list[DifferentRange] = msgspec.field(default_factory=list)
    keys: list[KeyDifference] = msgspec.field(default_factory=list)
    """The first different keys of each range."""
    sums: Checksum = msgspec.field(default_factory=Checksum)
    """Checksum of the compared rows of B, as B's stores compute it."""
    meter: Meter = msgspec.field(default_factory=Meter)
    puts: int = 0
    """Keys written to B."""
    deletes: int = 0
    """Keys removed from B."""

    def add(self, other: Report) -> None:
        """Add the figures of another."""
        self.counts += other.counts
        self.ranges += other.ranges
        self.keys += other.keys
        self.sums += other.sums
        self.meter.add(other.meter)
        self.puts += other.puts
        self.deletes += other.deletes
