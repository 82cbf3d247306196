"""Options of a verification, and its findings."""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Sequence
from fractions import Fraction

import msgspec
from msgspec import Struct

from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import UsageError
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_PART = re.compile(r"(\d+)/(\d+)")


class Subset(Struct, frozen=True):
    """A share of the files: ``10%`` (at least one file), or ``3/10``, the third of ten parts that together are all files."""

    share: Fraction = Fraction(1)
    part: int = 1
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> Subset:
        """Read ``10%``, ``0.5%`` or ``3/10``. Raises `UsageError`."""
        if percent := _PERCENT.fullmatch(text):
            share = Fraction(percent[1]) / 100
            if 0 < share <= 1:
                return cls(share=share)
        elif (part := _PART.fullmatch(text)) and 1 <= int(part[1]) <= int(part[2]):
            return cls(part=int(part[1]), parts=int(part[2]))
        raise UsageError(f"invalid --subset {text!r}: pass a percentage such as 10%, or a part such as 3/10")

    @property
    def is_all(self) -> bool:
        """Return whether all files are chosen."""
        return self.share == 1 and self.parts == 1

    def choose(self, files: Sequence[FileEntry], seed: int) -> list[FileEntry]:
        """The chosen files, in the order given."""
        if self.is_all:
            return list(files)
        drawn = sorted(files, key=lambda file: hashlib.sha256(f"{seed} {file.name}".encode()).digest())
        drawn = drawn[self.part - 1 :: self.parts]
        chosen = {file.name for file in drawn[: math.ceil(self.share * len(drawn))]}
        return [file for file in files if file.name in chosen]

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}" if self.parts > 1 else f"{float(self.share * 100):g}%"


class Level(enum.StrEnum):
    """Level of verification. `FILES` includes `META`, `DATA` includes `FILES`; `RESTORE` is `META` and the cluster."""

    META = "meta"
    """The backup's records, and a listing: every object exists with the recorded size."""
    FILES = "files"
    """Every byte of the files, against the recorded SHA-256."""
    DATA = "data"
    """Every row: blocks, order, encoding, and the recorded sums."""
    RESTORE = "restore"
    """A cluster has the same rows as the backup."""


class Finding(Struct, frozen=True):
    """One problem."""

    object: str
    """Name of an object of the backup, or a range of the cluster."""
    cause: str
    level: Level
    """The lowest level that finds it."""


class VerifyOptions(ExecutorOptions, frozen=True):
    """Options of one verification."""

    storage: StorageLocation
    level: Level = Level.FILES
    cluster: ClusterConfig | None = None
    """Required for `Level.RESTORE`."""
    to_keyspace: str = ""
    """Id or name of the cluster's keyspace (API V2), for `Level.RESTORE`; ``""`` = the one with the same name as in the backup."""
    by_name: bool = True
    """Whether keyspaces are found by their names. A drill's own playground has no names; there keyspaces are found by their ids."""
    span: KeyRange = EVERY_KEY
    """User keys to verify at the levels above `Level.META`: files that have none of them are not read."""
    subset: Subset = msgspec.field(default_factory=Subset)
    """Files to verify at the levels above `Level.META`."""
    seed: int = 0
    """Seed for the choice of a subset."""
