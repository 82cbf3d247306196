"""The backup's own records: read them as far as they read, and hold them against each other and a listing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TypeVar

from tikv_br.backupset import layout, manifest, meta
from tikv_br.backupset.backup_set import BackupSet, file_kind
from tikv_br.backupset.coverage import prove_disjoint
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.manifest import Manifest
from tikv_br.backupset.meta import MetaContent
from tikv_br.errors import BackupDamaged, BackupUnsupported, CoverageError, CrypterMismatch, StorageObjectMissing
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.verify.options import Finding, Level

T = TypeVar("T")


def read_backup(store: ObjectStore) -> tuple[BackupSet | None, list[Finding]]:
    """Read `backupmeta` and the manifest. Where one of them is damaged, go on with the other; None when neither reads.

    Raises `BackupNotFound`, `BackupUnsupported`, `CrypterMismatch` and `StorageError`.
    """
    try:
        return BackupSet.open(store), []
    except BackupDamaged as error:
        damage = error.message
    findings: list[Finding] = []
    crypter = store.location.crypter
    known = _read(store, layout.MANIFEST, partial(manifest.load, crypter=crypter), findings)
    content = _read(store, layout.META, partial(meta.decode, crypter=crypter), findings)
    if not findings:
        findings = [Finding(layout.META, damage, Level.META)]
    if known is not None:
        return _by_manifest(store, known), findings
    return (None if content is None else _by_meta(store, content)), findings


def check_records(backup: BackupSet) -> Iterator[Finding]:
    """What the records say that cannot be: ranges with keys in common, sums that do not add up."""
    try:
        prove_disjoint(backup.ranges)
    except CoverageError as error:
        yield Finding(layout.META, f"of the backup's ranges {error.message}", Level.META)
    for before, file in pairwise(sorted(backup.files, key=lambda file: file.key_range)):
        if not before.key_range.end or file.start_key < before.end_key:
            cause = f"its range {file.key_range} overlaps that of {before.name}, {before.key_range}"
            yield Finding(file.name, cause, Level.META)
    if backup.manifest is not None:
        yield from _check_statistics(backup, backup.manifest)


def check_listing(
    backup: BackupSet, listing: Mapping[str, ObjectInfo]
) -> tuple[list[FileEntry], list[Finding], list[str]]:
    """The files that are there in their size, what is wrong with the others, and the objects that no record names."""
    present: list[FileEntry] = []
    findings: list[Finding] = []
    for file in backup.files:
        info = listing.get(file.name)
        if info is None:
            findings.append(Finding(file.name, "is missing", Level.META))
        elif file.size and info.size != file.size:
            cause = f"has {info.size} bytes, not the recorded {file.size}"
            findings.append(Finding(file.name, cause, Level.META))
        else:
            present.append(file)
    named = {layout.META, layout.MANIFEST, layout.LOCK, *(file.name for file in backup.files)}
    foreign = [name for name in listing.keys() - named if not name.startswith(f"{layout.RESTORE}/")]
    return present, findings, sorted(foreign)


def _read(store: ObjectStore, name: str, parse: Callable[[bytes], T], findings: list[Finding]) -> T | None:
    try:
        return parse(store.get(name))
    except StorageObjectMissing:
        if name == layout.MANIFEST:
            findings.append(Finding(name, "is missing, though the backup is of this tool", Level.META))
    except (BackupDamaged, BackupUnsupported, CrypterMismatch) as error:
        findings.append(Finding(name, error.message, Level.META))
    return None


def _check_statistics(backup: BackupSet, known: Manifest) -> Iterator[Finding]:
    sums, said = backup.totals, known.statistics
    for name, found, recorded in (
        ("rows", sums.total_kvs, said.total_kvs),
        ("bytes of keys and values", sums.total_bytes, said.total_bytes),
        ("stored bytes", sums.size, said.backup_size),
        ("crc64xor", sums.crc64xor, said.crc64xor),
    ):
        if found != recorded:
            yield Finding(layout.MANIFEST, f"says {recorded} {name} where its files have {found}", Level.META)


def _by_manifest(store: ObjectStore, known: Manifest) -> BackupSet:
    about = known.description
    return BackupSet(
        store=store,
        api_version=about.dst_api_version,
        cluster_id=about.cluster_id,
        cluster_version=about.cluster_version,
        ranges=about.ranges,
        files=known.files,
        backup_ts=about.backup_ts,
        file_kind=file_kind(about),
        manifest=known,
    )


def _by_meta(store: ObjectStore, content: MetaContent) -> BackupSet:
    return BackupSet(
        store=store,
        api_version=content.api_version,
        cluster_id=content.cluster_id,
        cluster_version=content.cluster_version,
        ranges=content.ranges,
        files=content.files,
        backup_ts=content.backup_ts,
        file_kind=content.file_kind,
        manifest=None,
    )
