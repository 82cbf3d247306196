"""Probes of a storage, against storages that lie in one way each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.faulty_store import FaultyStore
from tikv_br.check.probe import ProbeOutcome, Status
from tikv_br.check.storage_probes import (
    delete_twice,
    list_at_once,
    put_conditionally,
    read_ranges,
    upload_parts,
    write_and_read,
)
from tikv_br.errors import StorageConflict, StorageUnreachable
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.url import StorageLocation

Act = Callable[[ObjectStore, str], ProbeOutcome]
ACTS: list[Act] = [write_and_read, put_conditionally, list_at_once, upload_parts, read_ranges, delete_twice]


class Unconditional(LocalObjectStore):
    """Takes no notice of a condition."""

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Overwrite."""
        return self.put(name, data)


class Spiteful(LocalObjectStore):
    """Refuses, and overwrites all the same."""

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Overwrite and refuse the second."""
        there = any(True for _ in self.list())
        info = self.put(name, data)
        if there:
            raise StorageConflict("taken")
        return info


class Forgetful(LocalObjectStore):
    """Its listings are of yesterday."""

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """Leave out one."""
        return iter(list(super().list(folder))[1:])


class Remembering(LocalObjectStore):
    """Records its deletions."""

    def delete(self, name: str) -> None:
        """Keep it."""


class Whole(LocalObjectStore):
    """Knows no ranges: always gives from the start."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Give the head."""
        return super().get_range(name, 0, length)


class Early(LocalObjectStore):
    """Shows what is not finished."""

    def open_writer(self, name: str) -> Writer:
        """Make it visible at once."""
        self.put_if_absent(name, b"")
        return super().open_writer(name)


class Corrupting(LocalObjectStore):
    """Loses the last byte."""

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Cut it."""
        return super().put(name, data[:-1])


def place(folder: Path) -> StorageLocation:
    """A directory."""
    return StorageLocation("local", str(folder / "store"))


@pytest.mark.parametrize("act", ACTS)
def test_an_honest_store_passes(act: Act, tmp_path: Path) -> None:
    """A directory does all that is needed."""
    assert act(LocalObjectStore(place(tmp_path)), "scratch/x").status is Status.OK


@pytest.mark.parametrize(
    ("kind", "act", "said"),
    [
        (Unconditional, put_conditionally, "not honoured"),
        (Spiteful, put_conditionally, "has overwritten"),
        (Forgetful, list_at_once, "1 of 2 objects"),
        (Remembering, list_at_once, "2 deleted objects"),
        (Remembering, delete_twice, "still read"),
        (Whole, read_ranges, "returns other bytes"),
        (Early, upload_parts, "before its upload is finished"),
        (Whole, upload_parts, "not what was uploaded"),
        (Corrupting, write_and_read, "not the one just written"),
    ],
)
def test_every_lie_is_found(kind: type[LocalObjectStore], act: Act, said: str, tmp_path: Path) -> None:
    """With the words that name it, and advice."""
    verdict = act(kind(place(tmp_path)), "scratch/x")
    assert verdict.status is Status.FAIL
    assert said in verdict.seen
    assert verdict.advice


def test_a_write_that_fails_is_an_error(tmp_path: Path) -> None:
    """The runner turns the error into a failed probe."""
    with pytest.raises(StorageUnreachable):
        write_and_read(FaultyStore(LocalObjectStore(place(tmp_path)), "b"), "scratch/x")
