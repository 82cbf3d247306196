"""Run a restore from its options to its summary; abort unfinished ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tikv_br.backupset.files import totals
from tikv_br.cancellation import clean_up
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.import_mode import DownloadLimit, ImportMode
from tikv_br.cluster.ingest_announcer import finish_killed
from tikv_br.errors import BackupSetError, ClusterError, EtcdRefused
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.plan import RestorePlan
from tikv_br.restore.record import (
    RestoreRecord,
    check_none_running,
    import_mode_records,
    remove_all,
    restore_ids,
    schedulers_of,
)
from tikv_br.restore.resume import marks_of
from tikv_br.restore.steps import check_fit, connect, plan, read_backup, restore_steps
from tikv_br.restore.target import check_target
from tikv_br.restore.txn import txn_restore_steps
from tikv_br.steps import run_steps
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """Result of a restore, or of a dry run. Bytes are of keys and values, before encoding."""

    total_kvs: int
    total_bytes: int
    backup_size: int
    """Bytes of the files as stored."""
    crc64xor: int
    """Checksum of the files' rows, as recorded in the backup; for partly restored files, of all their rows."""
    verified: bool
    """True if the cluster's checksums were compared and equal."""
    other_kvs: int
    """Rows of the target's range that the backup does not have, left alone; 0 if not compared."""
    backup_ts: int
    seconds: float
    average_speed: float
    """Bytes of keys and values per second."""
    api_version: str
    dst_api_version: str
    engine: str
    key_mode: str
    """``raw`` or ``txn``."""
    files: int
    resumed_files: int
    """Files that an unfinished restore had completely restored."""
    regions: int
    """Regions that ingested a file; counted once per file."""
    expired_kvs: int
    """Rows that were not put because they had expired; 0 for an ingest, which includes them, invisible to readers."""
    uploaded_files: int
    """Files that tikv-br sent to the stores."""
    downloads: int
    """Number of downloads by stores: at least one per replica, more if the file is in several regions."""
    restamp_ts: int
    """New timestamp of all rows, or of those that newer deletes had hidden; 0 = rows kept their own, or were put."""
    storage: str
    cluster_id: int
    dry_run: bool
    session_seconds: float
    """Start-up time of Spark; 0 on the driver."""
    step_seconds: dict[str, float]
    overlap_seconds: dict[str, float]
    """Seconds, by step, for which its work was done while an earlier step ran; not in `step_seconds`."""


def restore(
    options: RestoreOptions,
    reporter: Reporter = silent,
    on_plan: Callable[[RestorePlan], None] = lambda _plan: None,
) -> RestoreSummary:
    """Restore a backup; returns when it is complete and verified. Raises `TikvBrError`.

    ``on_plan`` gets the plan of a dry run, which ends with it.
    """
    began = time.monotonic()
    context = RestoreContext(options, reporter)
    with context.clusters, contextlib.closing(context):
        steps = restore_steps if options.key_mode is KeyMode.RAW else txn_restore_steps
        timings = run_steps(steps(options), context, reporter, clean_up)
    seconds = time.monotonic() - began
    if context.plan is not None:
        on_plan(context.plan)
    sums = totals(part.totals for part in context.parts)
    rows, size = sums.total_kvs, sums.total_bytes
    if context.found is not None:
        rows, size = context.found.total_kvs, context.found.total_bytes
    manifest = context.backup.manifest
    source = manifest.description.api_version if manifest else context.backup.api_version
    return RestoreSummary(
        total_kvs=rows,
        total_bytes=size,
        backup_size=sums.size,
        crc64xor=context.found.crc64xor if context.found is not None else sums.crc64xor,
        verified=context.found is not None,
        other_kvs=sum(context.others.values()) if context.found is not None else 0,
        backup_ts=context.backup.backup_ts,
        seconds=round(seconds, 3),
        average_speed=round(size / max(seconds, 1e-9)),
        api_version=source.label,
        dst_api_version=context.backup.api_version.label,
        engine=options.mode.value,
        key_mode=options.key_mode.value,
        files=context.file_count,
        resumed_files=context.resumed_files,
        regions=context.done.regions,
        expired_kvs=context.done.expired,
        uploaded_files=context.done.uploaded,
        downloads=context.done.downloads,
        restamp_ts=context.restamp_ts,
        storage=context.backup.store.location.redacted(),
        cluster_id=context.info.cluster_id,
        dry_run=options.dry_run,
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
        overlap_seconds={name: round(value, 3) for name, value in context.overlap_seconds.items()},
    )


def check_target_is_empty(options: RestoreOptions) -> None:
    """Raise `TargetNotEmpty` as a restore of this backup would, without a look at files or earlier restores; other `TikvBrError`."""
    context = RestoreContext(replace(options, checksum=False), silent)
    with context.clusters, contextlib.closing(context):
        for check in (connect, read_backup, check_fit, plan, check_target):
            check(context)


@dataclass(frozen=True, slots=True)
class AbortedRestores:
    """Result of `abort_restores`."""

    forgotten_restores: int
    put_back: bool
    """True if the cluster was in import mode for one of them, and has left it."""


def abort_restores(location: StorageLocation, cluster: ClusterConfig | None) -> AbortedRestores:
    """Remove the records of all unfinished restores at a backup or a ``--state`` location, and end their import mode.

    Import mode and download limits are reset, and followers go on, in ``cluster`` only; elsewhere they end by their own timeout. Raises `LeaseHeld` while
    one of the restores is running, `StorageError`, `ClusterError`.
    """
    store = open_store(location)
    check_none_running(store)
    put_back = False
    if cluster is not None:
        with Cluster.connect(cluster) as live:
            left = import_mode_records(store, live.cluster_id)
            if left:
                try:
                    ImportMode(live, schedulers_of(left)).leave()
                    put_back = True
                except ClusterError as error:
                    log.warning("%s", error.message)
            DownloadLimit(live, 0, "").start()
            marked = _marked(live, store)
            if live.api_version is ApiVersion.V2:
                finish_killed(live, marked)
            for each in marked:
                marks_of(live).remove(each)
    return AbortedRestores(remove_all(store), put_back)


def _marked(live: Cluster, store: ObjectStore) -> list[str]:
    """The restores with records in ``store`` that began in this cluster, as its marks prove: another id may be that of a running one."""
    found = []
    for restore_id in restore_ids(store):
        try:
            checkpoint = RestoreRecord(store, restore_id).read_checkpoint()
            mark = None if checkpoint is None else marks_of(live).read(restore_id)
        except (BackupSetError, EtcdRefused) as error:
            log.warning(
                "what an unfinished restore announced in the cluster stays until its lease ends: %s", error.message
            )
            continue
        if checkpoint is not None and mark is not None and mark.matches(checkpoint.secret):
            found.append(restore_id)
    return found
