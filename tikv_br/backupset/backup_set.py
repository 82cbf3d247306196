"""A backup as a whole, ours or the Go tool's, as it is read; `backup_writer` makes one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import posixpath
from dataclasses import replace
from operator import ne

from msgspec import Struct

from tikv_br.backupset import layout, manifest
from tikv_br.backupset.backupmeta import TOOL_PREFIX, MetaContent, decode, encode, meta_content
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import (
    FileEntry,
    FileKind,
    FilePair,
    Totals,
    pair_files,
    totals,
    verify_file_content,
    verify_file_identity,
)
from tikv_br.backupset.manifest import Description, Manifest
from tikv_br.backupset.sealed import key_of, with_key
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.cluster.versions import lacks_expiry
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupSetError,
    BackupUnsupported,
    CrypterMismatch,
    StorageError,
    StorageObjectMissing,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import PLAIN, Crypter
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.storage.url import parse as parse_url

log = logging.getLogger(__name__)

MAX_CHAIN = 10_000
"""Maximum number of backups in a chain: a year of one per hour."""


class BackupSet(Struct, frozen=True):
    """A complete backup, according to its own records."""

    store: ObjectStore
    api_version: ApiVersion
    """API version of the files."""
    cluster_id: int
    cluster_version: str
    ranges: tuple[KeyRange, ...]
    """RPC keys of `api_version`."""
    files: tuple[FileEntry, ...]
    backup_ts: int
    """Backup-ts; 0 = none."""
    file_kind: FileKind
    manifest: Manifest | None
    """None for a backup of the Go tool."""
    key_mode: KeyMode = KeyMode.RAW

    @classmethod
    def open(cls, store: ObjectStore, key_mode: KeyMode | None = KeyMode.RAW) -> BackupSet:
        """Read the records and compare them with each other; reads no data file.

        ``key_mode``: the kind of data that the caller supports; None = any.
        Raises `BackupNotFound`, `BackupDamaged` naming the object, `BackupUnsupported`, `CrypterMismatch`.
        """
        try:
            data = store.get(layout.META)
        except StorageObjectMissing as error:
            raise BackupNotFound(
                f"no complete backup at {store.location}: {error.message}", hint=_hint_for_root(store)
            ) from None
        if store.location.crypter.others:
            store = _with_fitting_key(store, data)
        known = _read_manifest(store, data)
        if known is not None and hashlib.sha256(data).digest() != known.backupmeta_sha256:
            raise BackupDamaged(_meta_damage(data, known, store.location.crypter))
        content = decode(data, store.location.crypter)
        if known is None and content.tool.startswith(TOOL_PREFIX):
            raise BackupDamaged(f"{layout.MANIFEST} is missing, although {layout.META} was written by tikv-br")
        if known is None:
            check_unproven(store.location)
        # Both carry hashes of their own; this finds what a faulty writer, or an edit of both, has changed.
        if known is not None and content != decode(encode(meta_content(known.description, known.files))):
            raise BackupDamaged(f"{layout.META} and {layout.MANIFEST} contradict each other")
        found = cls.from_records(store, content, known)
        if key_mode is not None:
            found.require_mode(key_mode)
        return found

    @classmethod
    def from_records(cls, store: ObjectStore, content: MetaContent, known: Manifest | None) -> BackupSet:
        return cls(
            store=store,
            api_version=content.api_version,
            cluster_id=content.cluster_id,
            cluster_version=content.cluster_version,
            ranges=content.ranges or _recorded_ranges(content, known),
            files=tuple(content.files if known is None else known.files),
            backup_ts=content.backup_ts,
            file_kind=content.file_kind,
            manifest=known,
            key_mode=content.key_mode,
        )

    def codec_of(self, span: KeyRange) -> KeyCodec:
        """The codec of the keyspace that a range of the backup lies in. Raises as `coverage.codec_of`."""
        return codec_of(self.api_version, span, self.key_mode)

    @property
    def expiry_recorded(self) -> bool:
        """Return whether file entries have expiries. Entries of the Go tool do not, nor V2 ones by some versions of TiKV."""
        if self.manifest is None:
            return False
        description = self.manifest.description
        by_stores = description.engine == "store" and description.api_version is self.api_version is ApiVersion.V2
        return not (by_stores and lacks_expiry(description.cluster_version))

    @classmethod
    def open_any(cls, store: ObjectStore, key_mode: KeyMode | None = KeyMode.RAW) -> BackupSet:
        """Open as `open`, also with a key that a backup in clear does not need, and one without a manifest.

        To describe or remove it: with a key, nothing proves that such a backup has the rows that were backed up.
        """
        crypter = store.location.crypter
        if not crypter.encrypts:
            return cls.open(store, key_mode)
        with contextlib.suppress(CrypterMismatch):
            return cls.open(open_store(replace(store.location, crypter=PLAIN)), key_mode)
        return cls.open(open_store(replace(store.location, crypter=replace(crypter, unproven=True))), key_mode)

    def chain(self) -> list[BackupSet]:
        """The full backup that this one continues, the increments since then, and this one; itself alone if it is full.

        Raises `BackupNotFound` for a parent that is gone, `BackupDamaged` if another backup is in its place, or if a backup
        continues itself.
        """
        found, seen = [self], _identities(self)
        while (parent := found[-1].parent()) is not None:
            marks = _identities(parent)
            if marks & seen or len(found) == MAX_CHAIN:
                why = "continues itself" if marks & seen else f"continues more than {MAX_CHAIN:,} backups"
                raise BackupDamaged(f"{self.store.location} {why}, which no backup does: see {parent.store.location}")
            seen |= marks
            found.append(parent)
        return found[::-1]

    def parent(self) -> BackupSet | None:
        """The backup that this one continues, if it is incremental. Raises as `chain`."""
        if self.manifest is None or not self.manifest.description.parent:
            return None
        description = self.manifest.description
        store = open_store(_parent_location(self.store.location, description))
        parent = BackupSet.open_any(store)
        found = hashlib.sha256(store.get(layout.META)).digest()
        if found != description.parent_sha256:
            raise BackupDamaged(
                f"{store.location} is another backup than the one that {self.store.location} continues: its "
                f"{layout.META} has the sha256 {found.hex()[:16]}…, not {description.parent_sha256.hex()[:16]}…"
            )
        return parent

    @property
    def is_increment(self) -> bool:
        """Return whether it has only the changes since another backup."""
        return self.manifest is not None and bool(self.manifest.description.parent)

    def require_mode(self, key_mode: KeyMode) -> None:
        """Raise `BackupUnsupported` for data of another mode."""
        if self.key_mode is not key_mode:
            raise BackupUnsupported(
                f"{self.store.location} is a backup of {self.key_mode.label} data; this works with {key_mode.label} data only",
                hint=f"`tikv-br restore {self.key_mode.value}` restores it.",
            )

    def require_full(self) -> None:
        """Raise `BackupUnsupported` for an increment, whose rows are only the changes since another backup."""
        if self.is_increment:
            raise BackupUnsupported(
                f"{self.store.location} is an incremental backup: it has only the changes since another one",
                hint="Use `tikv-br restore raw`, which restores all of its chain, or `tikv-br backup merge` to make a full backup.",
            )

    @property
    def seconds(self) -> int:
        """Time of the backup, in seconds since the epoch: rows that expire later are live. 0 = it does not record its time.

        By PD's clock; where there are no timestamps, by the clock of the machine that made the backup.
        """
        recorded_ms = 0 if self.manifest is None else self.manifest.description.started_ms
        return (physical_ms(self.backup_ts) if self.backup_ts else recorded_ms) // 1000

    @property
    def encryption(self) -> str:
        """`Crypter.method` of files and records."""
        return self.store.location.crypter.method

    @property
    def totals(self) -> Totals:
        return totals(self.files)

    @property
    def pairs(self) -> list[FilePair]:
        """The parts of the backup. Raises as `pair_files`."""
        return pair_files(self.files, self.key_mode)

    @property
    def is_at_original_location(self) -> bool:
        """Return whether it is at the location where it was written, so that the recorded ETags are valid."""
        return self.manifest is not None and self.manifest.description.storage == self.store.location.redacted()

    def verify_identity(self, file: FileEntry) -> None:
        """See `verify_file_identity`; ETags are compared only where the backup was written."""
        verify_file_identity(self.store, file, etag_counts=self.is_at_original_location)

    def verify_content(self, file: FileEntry, readers: int = 1) -> None:
        verify_file_content(self.store, file, readers)


def _identities(backup: BackupSet) -> set[str]:
    """What no two backups of a chain share: the location, and the hash of `backupmeta`."""
    digest = set() if backup.manifest is None else {backup.manifest.backupmeta_sha256.hex()}
    return {backup.store.location.redacted(), *digest}


def _recorded_ranges(content: MetaContent, known: Manifest | None) -> tuple[KeyRange, ...]:
    """The ranges of a transactional backup, from the manifest or, for a backup of another tool, from its files."""
    if known is not None:
        return known.description.ranges
    return tuple(sorted({file.key_range for file in content.files}))


def _parent_location(here: StorageLocation, description: Description) -> StorageLocation:
    """Return the location of the parent: relative to the child's as recorded, since backups may have been copied together."""
    written, parent = parse_url(description.storage), parse_url(description.parent)
    if (parent.scheme, parent.bucket) != (written.scheme, written.bucket):
        return replace(parent, s3=here.s3, azure=here.azure, gcs=here.gcs, crypter=here.crypter)
    relative = posixpath.relpath("/" + parent.path.lstrip("/"), "/" + written.path.lstrip("/"))
    path = posixpath.normpath(posixpath.join("/" + here.path.lstrip("/"), relative))
    return replace(here, path=path if here.scheme == "local" else path.lstrip("/"))


def _meta_damage(data: bytes, known: Manifest, crypter: Crypter) -> str:
    """Return the difference if `backupmeta` does not belong to the manifest."""
    problem = f"its hash is not the one in {layout.MANIFEST}"
    try:
        names = [file.name for file in decode(data, crypter).files]
    except BackupDamaged as error:
        return error.message
    except BackupSetError:
        return f"{layout.META} is altered: {problem}"
    wanted = [file.name for file in known.files]
    is_other = names != wanted and not any(map(_differs_little, names, wanted))
    return f"{layout.META} {'belongs to another backup' if is_other else 'is altered'}: {problem}"


def _differs_little(one: str, other: str) -> bool:
    """Return whether two names differ in at most one character, as after a flipped bit. Different backups differ in many."""
    return len(one) == len(other) and sum(map(ne, one, other)) <= 1


def _read_manifest(store: ObjectStore, backupmeta: bytes) -> Manifest | None:
    try:
        data = store.get(layout.MANIFEST)
    except StorageObjectMissing:
        return None
    try:
        return manifest.load(data, store.location.crypter)
    except CrypterMismatch as error:  # a damaged one may look encrypted with another key
        if not _fits(backupmeta, store.location.crypter):
            raise
        raise BackupDamaged(f"{layout.MANIFEST} is damaged: the key fits {layout.META}, but {error.message}") from None


def check_unproven(location: StorageLocation) -> None:
    """Refuse, unless it was requested, a backup without a manifest where a key was passed. Raises `CrypterMismatch`.

    Without the manifest's HMAC, who may write to the storage can change the rows without the key: AES in counter mode does
    not notice it, and hashes of files are in `backupmeta`, which is encrypted in the same way.
    """
    if not location.crypter.encrypts:
        return
    problem = f"the encrypted backup at {location} has no {layout.MANIFEST}, so that nothing proves its integrity"
    if not location.crypter.unproven:
        raise CrypterMismatch(
            f"{problem}: anybody who may write there could have changed its rows",
            hint="If it is a backup of the Go TiKV-BR, pass --crypter.allow-unproven. Those of tikv-br have a manifest: "
            "it was deleted.",
        )
    log.warning("%s", problem)


def _with_fitting_key(store: ObjectStore, backupmeta: bytes) -> ObjectStore:
    """The store with the one of its keys that the backup was made with; with the first if it is none of them."""
    crypter = store.location.crypter
    with contextlib.suppress(StorageObjectMissing, BackupDamaged):
        if (found := key_of(store.get(layout.MANIFEST), crypter, layout.MANIFEST)) is not None:
            return with_key(store, found)
    return with_key(store, next((each for each in crypter.each if _fits(backupmeta, each)), crypter))


def _fits(backupmeta: bytes, crypter: Crypter) -> bool:
    """Return whether `backupmeta` can be decoded with a key, or without one."""
    try:
        decode(backupmeta, crypter)
    except BackupSetError:
        return False
    return True


def _hint_for_root(store: ObjectStore) -> str | None:
    """The hint if there are several backups below the URL; None = the usual one."""
    with contextlib.suppress(StorageError):
        if any(True for _ in store.list(layout.INDEX)):
            place = store.location.redacted()
            return f"Backups are listed below it: pass their id, or `newest`, with --storage {place}. `tikv-br list {place}` shows them."
    return None
