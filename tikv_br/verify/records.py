"""Checks of a backup's records, and of the listing of its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TypeVar

from tikv_br.backupset import backupmeta, layout, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.backupmeta import meta_content
from tikv_br.backupset.coverage import require_disjoint
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.identity import replaced_size_damage
from tikv_br.backupset.manifest import Manifest
from tikv_br.backupset.sealed import with_key_of
from tikv_br.errors import BackupDamaged, BackupUnsupported, CoverageError, CrypterMismatch, StorageObjectMissing
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.verify.options import Finding, Level

T = TypeVar("T")


def read_records(store: ObjectStore) -> tuple[BackupSet | None, list[Finding]]:
    """Read `backupmeta` and the manifest. If one is damaged, use the other; None if both are.

    Raises `BackupNotFound`, `BackupUnsupported`, `CrypterMismatch` and `StorageError`.
    """
    try:
        return BackupSet.open(store, key_mode=None), []
    except BackupDamaged as error:
        damage = error.message
    findings: list[Finding] = []
    store = with_key_of(store, layout.MANIFEST)
    crypter = store.location.crypter
    known = _read(store, layout.MANIFEST, partial(manifest.load, crypter=crypter), findings)
    content = _read(store, layout.META, partial(backupmeta.decode, crypter=crypter), findings)
    if not findings:
        findings = [Finding(layout.META, damage, Level.META)]
    if known is not None:
        content = meta_content(known.description, known.files)
    return (None if content is None else BackupSet.from_records(store, content, known)), findings


def check_records(backup: BackupSet) -> Iterator[Finding]:
    """Check the records for contradictions: overlapping ranges, and sums that do not add up."""
    try:
        require_disjoint(backup.ranges)
    except CoverageError as error:
        yield Finding(layout.META, f"has overlapping ranges: {error.message}", Level.META)
    for before, file in pairwise(sorted(backup.files, key=lambda file: (file.cf, file.key_range))):
        if before.cf == file.cf and (not before.key_range.end or file.start_key < before.end_key):
            cause = f"its range {file.key_range} overlaps that of {before.name}, {before.key_range}"
            yield Finding(file.name, cause, Level.META)
    if backup.manifest is not None:
        yield from _check_statistics(backup, backup.manifest)


def check_listing(
    backup: BackupSet, listing: Mapping[str, ObjectInfo]
) -> tuple[list[FileEntry], list[Finding], list[str]]:
    """The files that exist with the recorded size, the findings on the others, and the names of foreign objects."""
    present: list[FileEntry] = []
    findings: list[Finding] = []
    for file in backup.files:
        info = listing.get(file.name)
        if info is None:
            findings.append(Finding(file.name, "is missing", Level.META))
        elif damage := replaced_size_damage(backup.store, file, info.size):
            findings.append(Finding(file.name, damage, Level.META))
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
            findings.append(Finding(name, "is missing, although tikv-br made the backup", Level.META))
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
            yield Finding(layout.MANIFEST, f"records {recorded} {name}, but its files have {found}", Level.META)
