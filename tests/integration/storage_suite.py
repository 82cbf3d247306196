"""Behaviour of every object store: subclass `StorageSuite`, give it `location`, and all of it runs."""

from __future__ import annotations

import hashlib
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tikv_br.errors import StorageConflict, StorageError, StorageObjectMissing
from tikv_br.storage.base import ObjectInfo, ObjectStore, exists, read_chunks
from tikv_br.storage.cloud import PART_SIZE
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

ODD_NAMES = ("with space", "ü/ß", "per%20cent", "a+b&c=d", "#?*", "x" * 200)
BAD_NAMES = ("", "/absolute", "folder/", "a//b", "../outside", "a/../../b", "./a", "nul\0", "back\\slash")


class StorageSuite:
    """Conformance tests, each on an empty place of its own."""

    @pytest.fixture
    def location(self) -> Iterator[StorageLocation]:
        """An empty place."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, location: StorageLocation) -> ObjectStore:
        """The store under test."""
        return open_store(location)

    def test_put_is_read_back_whole_and_replaces(self, store: ObjectStore) -> None:
        """A put object has the bytes and size of the last put, the empty one too."""
        for data in (b"first, and longer", b"second", b""):
            assert store.put("folder/object", data).size == len(data)
            assert store.get("folder/object") == data
            assert store.stat("folder/object").size == len(data)

    def test_missing_objects_are_named(self, store: ObjectStore) -> None:
        """Every read of a missing object raises StorageObjectMissing with the object's name; `exists` says no."""
        store.put("folder/object", b"x")
        for name in ("nothing", "folder/nothing", "folder", "no/folder"):
            for read in (store.get, store.stat, lambda name: store.get_range(name, 0, 1)):
                with pytest.raises(StorageObjectMissing, match=name):
                    read(name)
            assert not exists(store, name)
        assert exists(store, "folder/object")

    def test_delete_is_idempotent(self, store: ObjectStore) -> None:
        """A deleted object is gone, its neighbours stay, and deleting nothing is no error."""
        store.put("folder/one", b"1")
        store.put("folder/two", b"2")
        for _twice in range(2):
            store.delete("folder/one")
        store.delete("no/such/object")
        assert [info.name for info in store.list()] == ["folder/two"]
        store.delete("folder/two")
        store.put("folder", b"a name may be reused for an object once the folder is empty")
        assert store.get("folder").startswith(b"a name")

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            (0, 10, b"0123456789"),
            (3, 4, b"3456"),
            (9, 1, b"9"),
            (8, 100, b"89"),
            (10, 5, b""),
            (99, 5, b""),
            (4, 0, b""),
        ],
    )
    def test_ranges(self, store: ObjectStore, offset: int, length: int, expected: bytes) -> None:
        """A range gives exactly its bytes, cut at the object's end, and nothing beyond it."""
        store.put("digits", b"0123456789")
        assert store.get_range("digits", offset, length) == expected

    def test_sweeping_spares_objects(self, store: ObjectStore) -> None:
        """Whatever it removes, no object and no object's folder goes; a place that is not there is no error."""
        store.sweep("a", deep=True)
        for name in ("top", "a/one", "a/b/two"):
            store.put(name, b"x")
        for folder in ("", "a", "none"):
            store.sweep(folder)
            store.sweep(folder or "a", deep=True)
        assert {info.name for info in store.list()} == {"top", "a/one", "a/b/two"}

    def test_list_is_by_folder(self, store: ObjectStore) -> None:
        """Listing is recursive, relative to the place, complete, and stops at folder borders."""
        contents = {"top": b"", "a/one": b"1", "a/b/two": b"22", "ab/three": b"333", "a.b": b"4444"}
        for name, data in contents.items():
            store.put(name, data)
        sizes = {name: len(data) for name, data in contents.items()}
        assert {info.name: info.size for info in store.list()} == sizes
        assert {info.name for info in store.list("a")} == {"a/one", "a/b/two"}
        assert {info.name for info in store.list("a/b")} == {"a/b/two"}
        assert list(store.list("none")) == []

    def test_list_agrees_with_stat(self, store: ObjectStore) -> None:
        """Size and mark of an object are the same from put, list and stat."""
        put = store.put("object", b"some bytes")
        assert [put] == list(store.list()) == [store.stat("object")]

    def test_list_and_stat_say_when_an_object_was_written(self, store: ObjectStore) -> None:
        """The time is that of the writing, to the second or two that servers round, and the same from both."""
        began = time.time() * 1000
        store.put("object", b"x")
        (listed,) = store.list()
        assert abs(store.stat("object").modified_ms - listed.modified_ms) < 1000
        assert began - 2000 < listed.modified_ms < time.time() * 1000 + 2000

    def test_places_do_not_see_each_other(self, location: StorageLocation, store: ObjectStore) -> None:
        """A store below another shares its objects; one whose name only begins alike does not."""
        store.put("inner/object", b"x")
        store.put("inner-not/object", b"y")
        inner = open_store(location.child("inner"))
        assert [info.name for info in inner.list()] == ["object"]
        assert inner.get("object") == b"x"

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names_round_trip(self, store: ObjectStore, name: str) -> None:
        """A name with signs that URLs and file systems treat specially comes back from list as it was put."""
        store.put(f"odd/{name}", name.encode())
        assert [info.name for info in store.list("odd")] == [f"odd/{name}"]
        assert store.get(f"odd/{name}") == name.encode()

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_names_that_lead_elsewhere_are_refused(self, store: ObjectStore, name: str) -> None:
        """No method accepts a name that is none: a damaged backupmeta cannot make us touch other objects."""
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.get(name),
            lambda: store.get_range(name, 0, 1),
            lambda: store.put(name, b""),
            lambda: store.put_if_absent(name, b""),
            lambda: store.stat(name),
            lambda: store.delete(name),
            lambda: store.open_writer(name),
        )
        for call in calls:
            with pytest.raises(StorageError, match="not a valid object name"):
                call()

    def test_put_if_absent_keeps_the_first(self, store: ObjectStore) -> None:
        """The second conditional put raises StorageConflict and changes nothing; after a deletion the name is free."""
        store.put_if_absent("folder/once", b"first")
        with pytest.raises(StorageConflict, match="folder/once"):
            store.put_if_absent("folder/once", b"second")
        assert store.get("folder/once") == b"first"
        store.delete("folder/once")
        store.put_if_absent("folder/once", b"third")
        assert store.get("folder/once") == b"third"

    def test_put_if_absent_has_one_winner(self, location: StorageLocation) -> None:
        """Of many concurrent conditional puts exactly one succeeds, and its bytes stay whole."""
        racers, rounds = 8, 5
        stores = [open_store(location) for _racer in range(racers)]
        for game in range(rounds):
            start = threading.Barrier(racers)

            def race(racer: int, start: threading.Barrier = start, game: int = game) -> bool:
                start.wait()
                try:
                    stores[racer].put_if_absent(f"race/{game}", bytes([racer]) * 50_000)
                except StorageConflict:
                    return False
                return True

            with ThreadPoolExecutor(racers) as pool:
                won = list(pool.map(race, range(racers)))
            assert sum(won) == 1
            assert stores[0].get(f"race/{game}") == bytes([won.index(True)]) * 50_000

    @pytest.mark.parametrize("size", [0, 1, PART_SIZE, PART_SIZE + 1, 3 * PART_SIZE + 12_345])
    def test_writer_streams(self, store: ObjectStore, size: int) -> None:
        """Pieces of any size, from buffers reused at once, become one object with the bytes in order."""
        data = random.Random(size).randbytes(size)
        with store.open_writer("folder/large") as writer:
            for piece in _pieces(data):
                reused = bytearray(piece)
                writer.write(memoryview(reused))
                reused[:] = bytes(len(reused))
            info = writer.close()
        assert info == store.stat("folder/large") == ObjectInfo("folder/large", size, info.etag)
        read = b"".join(read_chunks(store, "folder/large", size, chunk_size=1_000_003))
        assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()

    @pytest.mark.parametrize("size", [10, 2 * PART_SIZE + 10])
    def test_an_object_is_visible_after_close_only(self, store: ObjectStore, size: int) -> None:
        """Until close there is no object, or the old one, for readers and listers."""
        with store.open_writer("object") as writer:
            writer.write(bytes(size))
            assert list(store.list()) == []
            assert not exists(store, "object")
            writer.close()
        with store.open_writer("object") as writer:
            writer.write(b"new" * size)
            assert store.get_range("object", 0, 3) == bytes(3)
            writer.close()
        assert store.get_range("object", 0, 3) == b"new"

    @pytest.mark.parametrize("size", [10, 2 * PART_SIZE + 10])
    def test_aborted_writers_leave_nothing(self, store: ObjectStore, size: int) -> None:
        """Abort, an exception in the block, and a block without close leave no object; a repeated abort is harmless."""
        with store.open_writer("aborted") as writer:
            writer.write(bytes(size))
            writer.abort()
            writer.abort()
        with pytest.raises(RuntimeError, match="on purpose"):
            _fail_after(store, size)
        with store.open_writer("forgotten") as writer:
            writer.write(bytes(size))
        assert list(store.list()) == []

    def test_abort_after_close_keeps_the_object(self, store: ObjectStore) -> None:
        """Close is final."""
        with store.open_writer("object") as writer:
            writer.write(b"x")
            writer.close()
            writer.abort()
            for late in (writer.close, lambda: writer.write(b"y")):
                with pytest.raises(ValueError, match="closed"):
                    late()
        assert store.get("object") == b"x"

    def test_store_travels_to_tasks(self, store: ObjectStore) -> None:
        """A pickled store opens the same place at the other end."""
        store.put("object", b"x")
        copy = pickle.loads(pickle.dumps(store))
        assert copy.get("object") == b"x"
        assert copy.location == store.location

    def test_one_store_serves_many_threads(self, store: ObjectStore) -> None:
        """Concurrent writers, readers and listers of one store do not disturb each other."""

        def work(number: int) -> bytes:
            data = bytes([number]) * (100_000 + number)
            with store.open_writer(f"threads/{number}") as writer:
                writer.write(data)
                writer.close()
            assert f"threads/{number}" in {info.name for info in store.list("threads")}
            return store.get(f"threads/{number}")

        with ThreadPoolExecutor(8) as pool:
            for number, data in enumerate(pool.map(work, range(24))):
                assert data == bytes([number]) * (100_000 + number)


def stream(store: ObjectStore, name: str, pieces: int, size: int = 100_000) -> None:
    """Write an object of ``pieces`` times ``size`` zero bytes."""
    with store.open_writer(name) as writer:
        for _piece in range(pieces):
            writer.write(bytes(size))
        writer.close()


def _fail_after(store: ObjectStore, size: int) -> None:
    with store.open_writer("failed") as writer:
        writer.write(bytes(size))
        raise RuntimeError("on purpose")


def _pieces(data: bytes) -> Iterator[bytes]:
    chance = random.Random(7)
    place = 0
    while place < len(data):
        size = chance.choice((1, 1000, 65_536, 1 << 20, 9 << 20))
        yield data[place : place + size]
        place += size
