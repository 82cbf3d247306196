"""Probes of a storage. Each writes objects of its own in the run's scratch folder, and removes them.

One asks whether stores accept the storage, as backups that they write and restores that they read themselves need it.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tikv_br.check.probe import Figure, Probe, ProbeContext, ProbeOutcome, ProbeSkipped, fail, listed, ok, warn
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.topology import StoreState
from tikv_br.errors import ClusterUnreachable, StorageConflict, StorageDenied, StorageError, StorageObjectMissing
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.storage.base import ObjectStore, exists
from tikv_br.storage.credentials import to_backend
from tikv_br.storage.url import StorageLocation

_WITHOUT_STORES = "`backup raw --engine scan` and `restore raw --via upload` work all the same."
_NOT_BUILT_IN = "bad storage backend"
"""Error text of a TiKV that was built without a cloud."""


def probe_store_storage(context: ProbeContext) -> ProbeOutcome:
    """Each store opens the storage for the backup of one key, which does not exist: so nothing is written.

    Stores do not contact a cloud before they have something to write, so whether they reach it is not known.
    """
    options = context.options
    if options.storage is None:
        raise ProbeSkipped("no --storage")
    _ = context.store  # skips the probe if the storage does not answer
    cluster = context.cluster
    try:
        backend = to_backend(options.storage, send_credentials=options.send_credentials)
    except StorageDenied as error:
        return warn(error.message, f"{error.hint} {_WITHOUT_STORES}")
    request = request_of_nothing(cluster, backend)
    answers: dict[str, str] = {}
    for store in cluster.pd.stores():
        if not store.serves or store.state is not StoreState.UP:
            continue
        client = cluster.store(store.id)
        try:
            found = list(client.backup(request, timeout=client.request_timeout))
        except ClusterUnreachable:  # another probe reports it
            continue
        # An error of a region comes after the storage was opened.
        errors = [
            each.error.msg for each in found if each.HasField("error") and not each.error.HasField("region_error")
        ]
        answers[f"store {store.id}"] = errors[0] or "an error without a message" if errors else ""
    return judge_answers(answers, options.storage.scheme)


def request_of_nothing(cluster: Cluster, backend: brpb_pb2.StorageBackend) -> brpb_pb2.BackupRequest:
    """A backup of a range that contains one random key and no row; a range without any key would crash a store."""
    key = KeyCodec(cluster.api_version).rpc_key(b"tikv-br-check-" + secrets.token_bytes(16))
    return brpb_pb2.BackupRequest(
        cluster_id=cluster.cluster_id,
        start_key=key,
        end_key=key + b"\0",
        is_raw_kv=True,
        cf="default",
        dst_api_version=kvrpcpb_pb2.APIVersion.ValueType(cluster.api_version),
        storage_backend=backend,
    )


def judge_answers(answers: Mapping[str, str], scheme: str) -> ProbeOutcome:
    """Judge the errors of stores, by store; an empty one = it opened the storage."""
    refused = {store: error for store, error in answers.items() if error}
    if not answers:
        raise ProbeSkipped("no store answers")
    if not refused:
        return ok(f"opened by {len(answers)} {'store' if len(answers) == 1 else 'stores'}")
    seen = listed([f"{store} cannot open it: {error}" for store, error in refused.items()], 2)
    if any(_NOT_BUILT_IN in error for error in refused.values()):
        return warn(seen, f"These stores were built without {scheme}. {_WITHOUT_STORES}")
    if scheme == "local":
        return warn(
            seen, f"The path must be the same shared directory on the machines of all stores. {_WITHOUT_STORES}"
        )
    return warn(seen, f"Check the credentials, or the stores' own. {_WITHOUT_STORES}")


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
