"""A part of a backup's files, chosen by hash: the same for the same seed, spread over all keys. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tikv_br.backupset.files import FileEntry
from tikv_br.errors import UsageError

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_PART = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Subset:
    """``10%`` of the files, at least one, or the ``3/10``: third of ten parts, which together are all files."""

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
        raise UsageError(f"--subset {text!r}: write a percentage such as 10%, or a part such as 3/10")

    @property
    def is_all(self) -> bool:
        """Whether no file is left out."""
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
