"""What stores have answered, by range: the newest answer of each key counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tikv_br.backupset.coverage import KeyRange, intersection, missing
from tikv_br.cluster.pb import brpb_pb2


@dataclass(frozen=True, slots=True)
class StoredSst:
    """A file as the store that wrote it describes it."""

    name: str
    """In the backup."""
    file: brpb_pb2.File


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of the interval (RPC keys of the source) and the files that hold its rows; none where there are no rows."""

    range: KeyRange
    files: tuple[StoredSst, ...]


class RangeTree:
    """The answers that count: no two of them have a key in common."""

    def __init__(self, whole: KeyRange) -> None:
        self._whole = whole
        self._answers: list[Answer] = []

    def add(self, answer: Answer) -> list[Answer]:
        """Take an answer; returns those that it replaces, because they have a key in common with it.

        What a replaced answer covered beyond the new one is missing again: a file is taken whole or not at all.
        """
        if answer.range.is_empty:
            return []
        replaced = [old for old in self._answers if not intersection(old.range, answer.range).is_empty]
        self._answers = [old for old in self._answers if old not in replaced] + [answer]
        return replaced

    def gaps(self) -> list[KeyRange]:
        """What no answer covers, in order."""
        return missing(self._whole, (answer.range for answer in self._answers))

    def answers(self) -> list[Answer]:
        """Those that count, in the order of keys."""
        return sorted(self._answers, key=lambda answer: answer.range)

    def files(self) -> Iterable[StoredSst]:
        """The files of all answers, in the order of keys."""
        for answer in self.answers():
            yield from answer.files
