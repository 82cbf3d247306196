"""The local store: the conformance suite, and what only directories can do to it."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.storage_suite import StorageSuite, stream
from tikv_br.errors import (
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageNotRegular,
    StorageObjectMissing,
    StorageReadOnly,
)
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

ROOT = Path(__file__).resolve().parents[3]


class TestLocal(StorageSuite):
    """A directory that the first write makes."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> StorageLocation:
        """A directory that does not exist yet."""
        return parse(str(tmp_path / "not" / "yet" / "there"))

    def test_only_files_are_replaced(self, store: ObjectStore) -> None:
        """A pipe, or a device such as /dev/null, stays what it is."""
        pipe = Path(store.location.path) / "pipe"
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
        with pytest.raises(StorageNotRegular, match="is a named pipe"):
            store.put("pipe", b"content")
        assert pipe.is_fifo()
        assert [each.name for each in pipe.parent.iterdir()] == ["pipe"]

    def test_missing_directory_is_an_empty_place(self, store: ObjectStore) -> None:
        """Reading where nothing was ever written finds nothing, and makes no directory."""
        assert list(store.list()) == []
        with pytest.raises(StorageObjectMissing):
            store.get("backupmeta")
        assert not Path(store.location.path).exists()


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A store in a directory of its own."""
    return open_store(parse(f"local://{tmp_path}/place"))


def test_one_winner_among_processes(tmp_path: Path) -> None:
    """Exactly one of many processes that write the same name once succeeds."""
    location = parse(str(tmp_path / "race"))
    context = multiprocessing.get_context("spawn")
    racers = 4
    barrier = context.Barrier(racers)
    results: multiprocessing.Queue[bool] = context.Queue()
    processes = [context.Process(target=_race, args=(location, barrier, results)) for _racer in range(racers)]
    for process in processes:
        process.start()
    won = [results.get(timeout=180) for _racer in range(racers)]
    for process in processes:
        process.join()
        process.close()
    assert sum(won) == 1
    results.close()
    results.join_thread()


def _race(location: StorageLocation, barrier: object, results: multiprocessing.Queue[bool]) -> None:
    barrier.wait()  # type: ignore[attr-defined]  # a Barrier of multiprocessing has no public type
    try:
        open_store(location).put_if_absent("backupmeta", b"x")
    except StorageConflict:
        results.put(False)
    else:
        results.put(True)


def test_killed_writer_leaves_nothing_visible(store: ObjectStore) -> None:
    """SIGKILL in the middle of a write: no object, nothing listed, and the next writer is not disturbed."""
    script = f"""
        import time
        from tikv_br.storage.open import open_store
        from tikv_br.storage.url import parse
        writer = open_store(parse({store.location.redacted()!r})).open_writer("a/object")
        writer.write(bytes(5_000_000))
        print("written", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert any(Path(store.location.path, "a").iterdir()), "the temporary file shows that the write was under way"
    assert list(store.list()) == []
    with pytest.raises(StorageObjectMissing):
        store.stat("a/object")
    store.put("a/object", b"whole")
    assert store.get("a/object") == b"whole"


def test_durable_before_visible(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before its name appears, and the directory after it, so that power loss leaves all or nothing."""
    calls: list[str] = []
    real_fsync, real_replace, real_link = os.fsync, os.replace, os.link

    def fsync(descriptor: int) -> None:
        calls.append("sync directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "sync file")
        real_fsync(descriptor)

    def publish(real: Callable[..., None], *names: str, **named: int) -> None:
        calls.append("publish")
        real(*names, **named)

    store.put("first", b"so that the directory is there")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", partial(publish, real_replace))
    monkeypatch.setattr(os, "link", partial(publish, real_link))
    store.put("object", b"x")
    store.put_if_absent("other", b"x")
    assert calls == ["sync file", "publish", "sync directory"] * 2


def test_no_temporary_files_stay(store: ObjectStore) -> None:
    """After writes, conflicts and aborts the directory holds the objects and nothing else."""
    store.put("a", b"1")
    store.put_if_absent("b", b"1")
    with pytest.raises(StorageConflict):
        store.put_if_absent("b", b"2")
    with store.open_writer("c") as writer:
        writer.write(b"3")
    assert sorted(path.name for path in Path(store.location.path).iterdir()) == ["a", "b"]


def test_empty_folders_go_with_their_last_object(store: ObjectStore) -> None:
    """Deletion leaves no empty directories, but never removes the place itself."""
    store.put("a/b/c/object", b"1")
    store.delete("a/b/c/object")
    assert list(Path(store.location.path).iterdir()) == []


def test_deleting_and_writing_in_one_folder(store: ObjectStore) -> None:
    """Writers whose folder a deleter takes away as empty just make it again."""
    deadline = time.monotonic() + 2
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_churn, args=(store.location, "other", deadline))
    process.start()
    _churn(store.location, "mine", deadline)
    process.join()
    assert process.exitcode == 0
    process.close()


def test_a_deleter_that_is_quicker_than_the_disk(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that go whenever they are empty hold no writer up for long: it does not sync them before there is a file in them."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        for folder in ("folder/deep", "folder"):
            with contextlib.suppress(OSError):
                Path(store.location.path, folder).rmdir()
        fsync(descriptor)

    Path(store.location.path).mkdir()
    monkeypatch.setattr(os, "fsync", slow)
    store.put("folder/deep/object", b"x")
    assert store.get("folder/deep/object") == b"x"


def test_sweeping_while_another_takes_folders_away(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was empty, and goes while it is looked into, is none to complain of."""
    folder, scandir, looks = Path(store.location.path, "a", "b"), os.scandir, 0

    def look(descriptor: int) -> Iterator[os.DirEntry[str]]:
        nonlocal looks
        looks += 1
        folder.rmdir()
        return scandir(descriptor)

    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:  # pytest removes folders by it, too
        patch.setattr(os, "scandir", look)
        store.sweep("a", deep=True)
    assert looks == 1
    assert not folder.parent.exists()


def _churn(location: StorageLocation, name: str, deadline: float) -> None:
    store = open_store(location)
    while time.monotonic() < deadline:
        store.put(f"folder/deep/{name}", b"x")
        assert store.get(f"folder/deep/{name}") == b"x"
        store.delete(f"folder/deep/{name}")


def test_path_that_is_a_file(tmp_path: Path) -> None:
    """A file where the directory should be is said when writing, and is an empty place when reading."""
    (tmp_path / "file").write_text("in the way")
    store = open_store(parse(str(tmp_path / "file")))
    with pytest.raises(StorageReadOnly, match="cannot be written"):
        store.put("object", b"x")
    with pytest.raises(StorageObjectMissing):
        store.get("object")
    assert list(store.list()) == []


def test_file_system_without_links(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, writing exactly once is refused, not faked."""

    def no_links(*_names: str, **_folders: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StorageError, match="not support hard links"):
        store.put_if_absent("object", b"x")
    assert list(store.list()) == []


def test_file_size_limit_is_a_full_storage(store: ObjectStore) -> None:
    """A write that the kernel cuts off (here: by a file size limit) is StorageFull, and no object appears."""
    outcome = _run_limited(store.location, "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))")
    assert outcome == "StorageFull"
    assert list(store.list()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs rights that this user lacks")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_path_with_a_file_in_it_says_so(tmp_path: Path) -> None:
    """The path of the storage, or a part of it, is a file: reads and writes name it, and ask for a directory."""
    (tmp_path / "file").write_bytes(b"x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        store = open_store(parse(str(place)))
        said = rf"{tmp_path / 'file'} is a file, not a directory"
        with pytest.raises(StorageReadOnly, match=said) as caught:
            store.put("object", b"x")
        assert "directory" in caught.value.hint
        for read in (store.get, store.stat):
            with pytest.raises(StorageObjectMissing, match=said):
                read("object")


def test_full_disk(tiny_disk: Path) -> None:
    """ENOSPC while writing, streaming or writing once is StorageFull; old contents stay, nothing half-written appears."""
    store = open_store(parse(str(tiny_disk)))
    store.put("small", b"fits")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(StorageFull, match="No space left"):
            write("large", bytes(1_000_000))
    with pytest.raises(StorageFull):
        stream(store, "large", pieces=100)
    assert [path.name for path in tiny_disk.iterdir()] == ["small"]
    store.put("small", b"still fits")


def test_read_only_file_system(tiny_disk: Path) -> None:
    """On a read-only mount every write is StorageReadOnly, and reading works."""
    store = open_store(parse(str(tiny_disk)))
    store.put("object", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StorageReadOnly, match="Read-only file system"):
        store.put("other", b"x")
    with pytest.raises(StorageReadOnly):
        store.delete("object")
    assert store.get("object") == b"x"


def test_directories_that_the_user_may_not_write_or_read(tmp_path: Path) -> None:
    """Without the right to write: StorageReadOnly; without the right to read: StorageDenied."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "object").write_bytes(b"x")
    location = parse(str(place))
    place.chmod(0o555)
    assert _run_limited(location, _DROP_RIGHTS) == "StorageReadOnly"
    place.chmod(0o000)
    assert _run_limited(location, _DROP_RIGHTS, call='store.get("object")') == "StorageDenied"
    assert _run_limited(location, _DROP_RIGHTS, call="list(store.list())") == "StorageDenied"
    place.chmod(0o755)


# Root is above modes; a program that it starts without these two capabilities is not.
_DROP_RIGHTS = """
import ctypes
if os.geteuid() == 0:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.execv(sys.executable, [sys.executable, "-c", REST])
"""


def _run_limited(location: StorageLocation, limit: str, call: str = 'store.put("large", bytes(1_000_000))') -> str:
    """The name of the storage error that ``call`` ends with in a process that has first limited itself."""
    rest = f"""
import os, resource, sys
from tikv_br.errors import StorageError
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
store = open_store(parse({location.redacted()!r}))
try:
    {call}
except StorageError as error:
    print(type(error).__name__)
"""
    script = f"import os, resource, sys\nREST = {rest!r}\n{limit}\nexec(REST)"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.strip()


def test_listing_errors_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be listed is an error, not an empty place."""

    def denied(path: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(StorageDenied, match="cannot be listed"):
        list(open_store(parse(str(tmp_path))).list())


def test_a_sweep_removes_remains_of_killed_writers(tmp_path: Path) -> None:
    """Temporary files, and with ``deep`` folders without objects; nothing outside."""
    store = open_store(parse(str(tmp_path)))
    left = [".tikv-br-00", "a/.tikv-br-01", "a/b/.tikv-br-02", "a/c/d/.tikv-br-03", "z/.tikv-br-04"]
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    store.put("a/object", b"x")
    store.sweep()
    assert not (tmp_path / left[0]).exists()
    assert all((tmp_path / name).exists() for name in left[1:])
    store.sweep("a", deep=True)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/object", "z", left[4]]


def test_an_object_swept_while_it_is_written_is_written_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release of a lease sweeps its folder, where a rival may be about to acquire it: before or after the rename."""
    link, sweeps = os.link, 0

    def swept(*names: str, **folders: int) -> None:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 1:
            store.sweep("lease")
        link(*names, **folders)  # type: ignore[arg-type]
        store.sweep("lease")

    monkeypatch.setattr(os, "link", swept)
    store.put_if_absent("lease/1.json", b"mine")
    assert sweeps == 2
    assert store.get("lease/1.json") == b"mine"
    with pytest.raises(StorageConflict):
        store.put_if_absent("lease/1.json", b"another's")
    assert [each.name for each in Path(store.location.path, "lease").iterdir()] == ["1.json"]


def test_a_write_that_is_always_swept_fails(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails with a sentence, and nothing stays."""
    link = os.link

    def swept(*names: str, **folders: int) -> None:
        store.sweep("lease")
        link(*names, **folders)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", swept)
    with pytest.raises(StorageError, match="another process keeps removing"):
        store.put_if_absent("lease/1.json", b"mine")
    assert list(store.list()) == []


def test_a_deletion_that_was_broken_off_is_finished_by_another(store: ObjectStore) -> None:
    """Killed when it had removed the object and the first of its folders, it leaves empty ones: they go by the same deletion."""
    (Path(store.location.path) / "a" / "b").mkdir(parents=True)
    store.delete("a/b/c/object")
    assert list(Path(store.location.path).iterdir()) == []


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory beside the store, with a file in each place where links of the tests lead to."""
    for name in ("object", "folder/object", ".tikv-br-00", "deep/.tikv-br-00"):
        place = tmp_path / "victim" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"of another")
    return tmp_path / "victim"


def _state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ACTS: dict[str, Callable[[ObjectStore, str], object]] = {
    "get": lambda store, name: store.get(name),
    "get_range": lambda store, name: store.get_range(name, 0, 1),
    "stat": lambda store, name: store.stat(name),
    "put": lambda store, name: store.put(name, b"x"),
    "open_writer": lambda store, name: stream(store, name, pieces=1),
    "delete": lambda store, name: store.delete(name),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("link", ["object", "folder", "folder/object"])
def test_links_below_the_root_are_refused(store: ObjectStore, victim: Path, act: str, link: str) -> None:
    """Whether the name itself is a link, or a folder on the way to it: an error names the link, and nothing behind it changes."""
    place = Path(store.location.path, link)
    place.parent.mkdir(parents=True)
    place.symlink_to(victim / link)
    before = _state(victim)
    name = link if link.endswith("object") else f"{link}/object"
    with pytest.raises(StorageNotRegular, match=f"{place} is a symbolic link"):
        ACTS[act](store, name)
    assert _state(victim) == before
    assert place.is_symlink()


@pytest.mark.parametrize("act", [*ACTS, "put_if_absent"])
def test_new_objects_are_not_made_behind_links(store: ObjectStore, victim: Path, act: str) -> None:
    """Also where nothing is behind the link yet, as that of a folder of records that a first run makes."""
    place = Path(store.location.path, "tikv-br")
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    before = _state(victim)
    with pytest.raises(StorageNotRegular, match=f"{place} is a symbolic link"):
        (ACTS | {"put_if_absent": lambda store, name: store.put_if_absent(name, b"x")})[act](store, "tikv-br/new/one")
    assert _state(victim) == before


def test_listings_and_sweeps_do_not_follow_links(
    store: ObjectStore, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a link leads to is neither listed nor swept; each link is named. A listing of a link itself is refused."""
    store.put("real", b"x")
    root = Path(store.location.path)
    for number, target in enumerate((victim, victim / "object", victim / "deep", root)):
        (root / f"link-{number}").symlink_to(target)
    (root / ".tikv-br-link").symlink_to(victim / "object")
    before = _state(victim)
    assert [each.name for each in store.list()] == ["real"]
    store.sweep("", deep=True)
    assert _state(victim) == before
    assert {f"link-{number}" in caplog.text for number in range(4)} == {True}
    for act in (lambda: list(store.list("link-0")), lambda: store.sweep("link-0", deep=True)):
        with pytest.raises(StorageNotRegular, match="link-0 is a symbolic link"):
            act()
    assert _state(victim) == before


def test_pipes_sockets_and_devices_are_not_opened(store: ObjectStore, tmp_path: Path) -> None:
    """A reader of a pipe would wait forever; each is refused with what it is, and a listing leaves it out."""
    root = Path(store.location.path)
    root.mkdir()
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    kinds = {"pipe": "named pipe", "socket": "socket"}
    with contextlib.suppress(PermissionError):
        os.mknod(root / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        kinds["zero"] = "device"
    for name, kind in kinds.items():
        for act in ACTS.values():
            with pytest.raises(StorageNotRegular, match=f"{name} is a {kind}"):
                act(store, name)
        with pytest.raises(StorageNotRegular, match=f"{name} is a {kind}"):
            store.get(f"{name}/object")
    assert list(store.list()) == []


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    """The operator named it. A place derived from it is below it, and no root."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    location = parse(str(tmp_path / "link"))
    store = open_store(location)
    store.put("folder/object", b"x")
    assert (tmp_path / "real" / "folder" / "object").read_bytes() == b"x"
    assert [each.name for each in store.list()] == ["folder/object"]
    assert open_store(location.child("folder")).get("object") == b"x"
    (tmp_path / "real" / "inner").symlink_to(tmp_path / "real" / "folder")
    for inner in (location.child("inner"), pickle.loads(pickle.dumps(location.child("inner")))):
        with pytest.raises(StorageNotRegular, match="link/inner is a symbolic link"):
            open_store(inner).get("object")
    assert open_store(parse(f"{location.path}/inner")).get("object") == b"x"


def test_a_folder_swapped_for_a_link_after_it_was_opened(store: ObjectStore, victim: Path) -> None:
    """An object that is being written is finished in the directory where it was begun."""
    root = Path(store.location.path)
    with store.open_writer("folder/new") as writer:
        writer.write(b"x")
        (root / "folder").rename(root / "moved")
        (root / "folder").symlink_to(victim)
        writer.close()
    assert not (victim / "new").exists()
    assert (root / "moved" / "new").read_bytes() == b"x"


def test_a_very_deep_directory_ends_no_listing(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    """It is left out with a warning."""
    store.put("real", b"x")
    here = os.open(store.location.path, os.O_RDONLY)
    for _level in range(300):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert [each.name for each in store.list()] == ["real"]
    assert "directories deep" in caplog.text
