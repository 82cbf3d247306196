"""Probes of a storage. Each writes objects of its own in the run's scratch folder, and removes them."""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tikv_br.check.probe import Figure, Probe, ProbeContext, ProbeOutcome, ProbeSkipped, fail, ok, warn
from tikv_br.check.store_storage import probe_store_storage
from tikv_br.errors import StorageConflict, StorageError, StorageObjectMissing
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.url import StorageLocation

MULTIPART_SIZE = (8 << 20) + 4321
"""Bytes: more than one part of an upload."""
SPACE_WARN, SPACE_FAIL = (0.2, 100 << 30), (0.05, 5 << 30)
"""Part of the file system of a ``local://`` storage, and bytes: the smaller of the two is the limit, as a large disk is not
full with 5 % left."""
_NO_STORAGE_FOR_BACKUPS = "Use a storage that behaves like S3. Backups here could be damaged without notice."

Act = Callable[[ObjectStore, str], ProbeOutcome]


def probe_storage(context: ProbeContext) -> ProbeOutcome:
    """Check that the storage answers."""
    return ok(f"{context.opened.location}")


def write_and_read(store: ObjectStore, name: str) -> ProbeOutcome:
    """Check that an object reads as it was written, and can be overwritten."""
    for data in (secrets.token_bytes(1000), secrets.token_bytes(500)):
        store.put(name, data)
        if store.get(name) != data or store.stat(name).size != len(data):
            return fail("an object read back is not the one just written", _NO_STORAGE_FOR_BACKUPS)
    return ok("objects are read as they were written")


def put_conditionally(store: ObjectStore, name: str) -> ProbeOutcome:
    """Check that only the first of two conditional puts of the same object succeeds."""
    store.put_if_absent(name, b"first")
    try:
        store.put_if_absent(name, b"second")
    except StorageConflict:
        if store.get(name) == b"first":
            return ok("the second of two conditional puts is refused")
        return fail("a refused conditional put has overwritten the object", _NO_STORAGE_FOR_BACKUPS)
    return fail(
        "conditional puts (If-None-Match) are not honoured: both of two succeeded",
        "Two runs on one path would not notice each other. Never start two at once, or use another storage.",
    )


def list_at_once(store: ObjectStore, name: str) -> ProbeOutcome:
    """A listing shows what was just written, and no more what was just deleted."""
    names = {f"{name}/a", f"{name}/b/c"}
    for each in names:
        store.put(each, b"listed")
    seen = {info.name: info.size for info in store.list(name)}
    if seen != dict.fromkeys(names, len(b"listed")):
        return fail(f"a listing shows {len(seen)} of 2 objects just written", _NO_STORAGE_FOR_BACKUPS)
    for each in names:
        store.delete(each)
    if left := [info.name for info in store.list(name)]:
        return fail(f"a listing still shows {len(left)} deleted objects", _NO_STORAGE_FOR_BACKUPS)
    return ok("listings are up to date")


def upload_parts(store: ObjectStore, name: str) -> ProbeOutcome:
    """An object of several parts arrives whole, and not before it is finished."""
    data = secrets.token_bytes(MULTIPART_SIZE)
    with store.open_writer(name) as writer:
        writer.write(data)
        early = exists(store, name)
        writer.close()
    if early:
        return fail("an object is visible before its upload is finished", _NO_STORAGE_FOR_BACKUPS)
    if store.stat(name).size != len(data) or store.get_range(name, len(data) - 5000, 5000) != data[-5000:]:
        return fail("an object of several parts is not what was uploaded", _NO_STORAGE_FOR_BACKUPS)
    return ok(f"{len(data)} bytes in two parts")


def read_ranges(store: ObjectStore, name: str) -> ProbeOutcome:
    """Parts of an object can be read."""
    data = secrets.token_bytes(10_000)
    store.put(name, data)
    for offset, length in ((0, 10), (5000, 100), (9990, 100)):
        if store.get_range(name, offset, length) != data[offset : offset + length]:
            return fail(f"a ranged get of {length} bytes at {offset} returns other bytes", _NO_STORAGE_FOR_BACKUPS)
    return ok("ranged gets return the requested bytes")


def delete_twice(store: ObjectStore, name: str) -> ProbeOutcome:
    """Check that a deleted object is gone, and that deleting it again is no error."""
    store.put(name, b"to be deleted")
    store.delete(name)
    store.delete(name)
    try:
        store.get(name)
    except StorageObjectMissing:
        return ok("deleted objects are gone")
    return fail(
        "a deleted object is still read",
        "prune and abort cannot free space here. Check the bucket's versioning and object lock.",
    )


def probe_space(context: ProbeContext) -> ProbeOutcome:
    """The file system of a directory has room."""
    location = context.options.storage
    if location is None or location.scheme != "local":
        raise ProbeSkipped("object storage does not report its free space")
    folder = next(each for each in (Path(location.path), *Path(location.path).parents) if each.is_dir())
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}", hint="Check the health of its disk.") from None
    return judge_space(usage.free, usage.total)


def judge_space(free: int, total: int) -> ProbeOutcome:
    """See `probe_space`; both in bytes."""
    warn_below, fail_below = (min(int(part * total), most) for part, most in (SPACE_WARN, SPACE_FAIL))
    left = 100 * free / max(total, 1)
    figures = (
        Figure("storage_free", round(left, 1), "%"),
        Figure("storage_free_bytes", free, "B", f"{warn_below}:", f"{fail_below}:"),
    )
    seen = f"{left:.0f} % left, {free / 2**30:.1f} GiB"
    advice = "Prune old backups, or use another storage: a backup that runs out of space ends with exit code 22."
    if free < fail_below:
        return fail(seen, advice, *figures)
    return warn(seen, advice, *figures) if free < warn_below else ok(seen, *figures)


def storage_probes(location: StorageLocation | None) -> tuple[Probe, ...]:
    """The probes of a storage; without ``location`` only the first, which is skipped."""
    reach = Probe("storage", probe_storage)
    if location is None:
        return (reach,)
    acts = {
        "write": write_and_read,
        "conditional-put": put_conditionally,
        "list": list_at_once,
        "multipart": upload_parts,
        "ranged-get": read_ranges,
        "delete": delete_twice,
    }
    probes = [Probe(f"storage-{name}", functools.partial(_on_scratch, act, name)) for name, act in acts.items()]
    return (reach, *probes, Probe("storage-stores", probe_store_storage), Probe("storage-space", probe_space))


def remove_scratch(context: ProbeContext) -> None:
    """Remove the remaining objects of the run's folder. Raises `StorageError`, `ProbeSkipped`."""
    store = context.store
    for info in list(store.list(context.scratch)):
        store.delete(info.name)


def _on_scratch(act: Act, part: str, context: ProbeContext) -> ProbeOutcome:
    store, name = context.store, f"{context.scratch}/{part}"
    with _removed(store, name):
        return act(store, name)


@contextlib.contextmanager
def _removed(store: ObjectStore, name: str) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):  # the delete probe reports it
            store.delete(name)
