"""A restore from its options to its summary: the lists of steps for raw and for transactional data. Aborts unfinished ones.

If a step fails, the earlier ones are undone.

Ingested rows stay in the target when a restore fails: the same command resumes it. Removing them is the operator's decision.
Transactional data have files in pairs, one new timestamp for all rows, and need a target without locks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TypeAlias

from msgspec import Struct, structs

from tikv_br.backupset import lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import keyspace_codec
from tikv_br.backupset.files import FileKind, totals
from tikv_br.backupset.rows import keyspace_in
from tikv_br.cancellation import clean_up
from tikv_br.cluster import versions
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.import_mode import DownloadLimit, ImportMode
from tikv_br.cluster.ingest_announcer import finish_killed
from tikv_br.cluster.keyspaces import chosen_keyspace, keyspace_names, matching_keyspace
from tikv_br.cluster.locks import LockResolver
from tikv_br.cluster.pd_http import gc_status
from tikv_br.cluster.timestamps import seconds_between, show_ts
from tikv_br.errors import (
    ApiVersionMismatch,
    BackupSetError,
    BackupUnsupported,
    ChecksumMismatch,
    ClusterError,
    EtcdRefused,
    LeaseHeld,
    StorageDenied,
    StorageError,
    StorageReadOnly,
    TargetNotEmpty,
    TimestampAheadOfTso,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, intersection
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite, can_stores_rewrite
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.limits import RowLimits
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.report.facts import counted
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.inspect import rows_differ
from tikv_br.restore.options import Mode, Restamp, RestoreOptions, Via
from tikv_br.restore.plan import RestorePlan, RestoreRange, choose_parts, split_keys
from tikv_br.restore.record import (
    RestoreRecord,
    check_none_running,
    import_mode_records,
    remove_all,
    restore_ids,
    schedulers_of,
)
from tikv_br.restore.resume import (
    clean_up_interrupted,
    delete_checkpoint,
    enter_import_mode,
    find_resumable_restore,
    forget_if_different,
    leave_import_mode,
    marks_of,
    record_of,
    save_checkpoint,
)
from tikv_br.restore.target import (
    abandon_announcement,
    announce,
    check_files,
    check_followers,
    check_target,
    check_target_beside_files,
    check_timestamps,
    comparison_of,
    finish_announcement,
    limits_of_ranges,
    look_for_rows,
    notice_followers,
    report_followers,
)
from tikv_br.restore.transfer import (
    SAME_COMMAND,
    compare,
    compare_all,
    ingest,
    lift_limit,
    limit_downloads,
    or_notice,
    put,
    split,
    while_locked,
)
from tikv_br.steps import FunctionStep, run_steps
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.credentials import KEY_IN_CLEAR
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


def plan(context: RestoreContext) -> None:
    """Choose the wanted parts of the files. Raises `UsageError` where there are none, or no store can rename them so."""
    options, backup = context.options, context.backup
    rewriting = bool(options.to_keyspace) or options.rewrite_prefix != (b"", b"")
    moved_to = _moved_to(context)
    partial = options.span != EVERY_KEY or rewriting or options.keyspace is not None or moved_to is not None
    chosen = None if options.keyspace is None else keyspace_in(backup, str(options.keyspace))
    for whole in backup.ranges:
        span, rewrite, codec = whole, UNCHANGED, backup.codec_of(whole)
        if chosen not in {None, codec.keyspace_id}:
            continue
        target = moved_to or _same_keyspace(context, codec)
        if partial or target != codec:
            span = intersection(span, codec.rpc_range(options.span))
            rewrite = _rewrite(context, codec, target)
            span = intersection(span, rewrite.source)
        if not span.is_empty:
            context.wanted.append(RestoreRange(span, rewrite))
            context.keyspaces[target] = codec
    if not context.wanted:
        if options.keyspace is not None and backup.api_version is not ApiVersion.V2:
            raise UsageError(
                f"--keyspace: the backup is in API {backup.api_version.label} encoding, which has no keyspaces",
                hint="Omit --keyspace. To restore into a keyspace, pass --to-keyspace.",
            )
        raise UsageError(
            "the backup contains no part of the requested range",
            hint="`tikv-br show --view ranges` prints the ranges of the backup.",
        )
    if moved_to is not None and len({each.rewrite.old for each in context.wanted}) > 1:
        raise UsageError(
            f"{'--to-keyspace: ' if moved_to.is_v2 else ''}the backup has several keyspaces, which cannot be restored into one",
            hint="Choose one with --keyspace.",
        )
    context.names = _target_names(context, {} if moved_to else _recorded_names(context))
    context.parts = choose_parts(backup.pairs, context.wanted)


def _target_names(context: RestoreContext, same: Mapping[int, str]) -> dict[int, str]:
    """Names of the keyspaces to restore into: those in the backup if they are the ``same``, others by the target's PD."""
    pairs = [(target.keyspace_id, source.keyspace_id) for target, source in context.keyspaces.items()]
    found = {target: same[source] for target, source in pairs if source in same}
    others = {target for target, _ in pairs} - found.keys()
    return found | (keyspace_names(context.cluster, others) if context.options.by_name else {})


def _recorded_names(context: RestoreContext) -> dict[int, str]:
    return {} if context.backup.manifest is None else context.backup.manifest.description.names


def plan_changes(context: RestoreContext) -> None:
    """Make the plan of a dry run; asks PD for the target's regions."""
    codec, pd = context.codec, context.cluster.pd
    bounds = [(codec.bound(each.target.start), codec.bound(each.target.end)) for each in context.wanted]
    splits = {codec.bound(key): key for key in split_keys(context.todo, context.options.region_bytes)}
    regions: set[int] = set()
    for region in chain.from_iterable(pd.each_region(*each) for each in bounds):
        regions.add(region.id)
        splits.pop(region.start, None)
    context.plan = RestorePlan(
        wanted=tuple(context.wanted),
        parts=tuple(context.todo),
        resumed=context.resumed_files,
        splits=tuple(splits.values()),
        regions=len(regions),
    )


def _moved_to(context: RestoreContext) -> KeyCodec | None:
    """The keyspace to move to, by id or by name, or the keys of a cluster without keyspaces; None = keys stay as they are."""
    wanted, target = context.options.to_keyspace, context.codec
    if wanted:
        keyspace_id = chosen_keyspace(context.cluster, wanted)
        return keyspace_codec(target.api_version, keyspace_id, "--to-keyspace", mode=target.mode)
    if target.api_version is context.backup.api_version:
        return None
    if target.is_v2:
        raise UsageError("the backup has no keyspaces, but the cluster does", hint="Choose one with --to-keyspace.")
    return target


def _same_keyspace(context: RestoreContext, source: KeyCodec) -> KeyCodec:
    """The target's keyspace of the name that the backup records. Raises `UsageError` if there is none."""
    if not (context.options.by_name and source.is_v2):
        return source
    names = _recorded_names(context)
    found = matching_keyspace(context.cluster.pd, source.keyspace_id, names, "--to-keyspace", context.reporter)
    return KeyCodec(source.api_version, found, source.mode)


def _rewrite(context: RestoreContext, source: KeyCodec, target: KeyCodec) -> Rewrite:
    old, new = context.options.rewrite_prefix
    rewrite = Rewrite.of(source, old, target, new)
    by_stores = context.options.mode is Mode.INGEST and context.via is not Via.UPLOAD
    if by_stores and context.via is Via.STORES and rewrite.lacks_end(rewrite.target):
        raise UsageError(
            f"--rewrite-prefix: stores cannot replace a prefix by {show_key(new)}, above which there is no key",
            hint="Leave out --via stores: tikv-br then uploads these files.",
        )
    if by_stores and source.mode is KeyMode.RAW and not can_stores_rewrite(source.api_version, rewrite):
        raise UsageError(
            f"--rewrite-prefix: in API V2 stores can only replace a prefix by one whose length is equal or differs by a multiple of 8; "
            f"these have {len(old)} and {len(new)} bytes",
            hint="Choose another prefix, or pass --via upload or --mode put.",
        )
    return rewrite


log = logging.getLogger(__name__)
HELD = "Wait until the other restore has ended, or pass --lock-wait. The lock of a restore that was killed on another machine expires after up to 40 s, on S3 up to 100 s."


def acquire_restore_lock(context: RestoreContext) -> None:
    """Acquire the lock. Raises `LeaseHeld`. Without a writable storage, the restore runs without a lock."""
    context.record = record_of(context)
    try:
        context.lease = lease.acquire(
            context.record.lease_store(),
            "restore",
            wait=context.options.lock_wait,
            on_wait=lambda holder: context.reporter(Notice(f"waiting for another restore of this backup: {holder}")),
        )
    except LeaseHeld as error:
        error.hint = HELD
        raise
    except (StorageReadOnly, StorageDenied):
        return  # reported when the checkpoint cannot be saved
    except StorageError as error:
        context.reporter(
            Notice(
                f"the restore runs without a lock, so another restore of this backup into this cluster would not be noticed: {error.message}"
            )
        )


def release_restore_lock(context: RestoreContext) -> bool:
    """Release the lock, also after a failure. Errors are only logged: the lease expires. Returns False if there was none."""
    held, context.lease = context.lease, None
    if held is None:
        return False
    try:
        if held.try_release() and context.record is not None and held.lost is None:
            context.record.sweep_lease()
    except StorageError as error:
        log.warning("cannot remove the empty folder of the restore's lock: %s", error.message)
    return True


FIRST_CHANGE = "save the restore checkpoint"
"""The step before which no row of the target changes; a dry run ends there."""


RestoreStep: TypeAlias = FunctionStep[RestoreContext]


def restore_steps(options: RestoreOptions) -> list[RestoreStep]:
    """The runbook of RawKV data. A dry run ends before the first change."""
    checks = first_steps(options, FunctionStep("check that backup and cluster match", check_fit))
    changes = [
        FunctionStep(FIRST_CHANGE, while_locked(save_checkpoint)),
        FunctionStep("split and scatter", while_locked(split)),
    ]
    end = []
    if options.mode is Mode.PUT:
        checks.append(FunctionStep("check for followers", report_followers))
        changes.append(FunctionStep("put", while_locked(put)))
    else:
        checks += [
            FunctionStep("check timestamps", check_timestamps),
            FunctionStep("check for followers", check_followers),
        ]
        changes.insert(0, FunctionStep("announce the ingest", while_locked(announce), abandon_announcement))
        changes += ingest_steps(options)
        end.append(FunctionStep("announce its end", finish_announcement))
    if options.checksum:
        changes.append(FunctionStep("compare checksums", compare))
    return runbook(options, checks, changes, end)


def first_steps(options: RestoreOptions, fit: RestoreStep, *before_target: RestoreStep) -> list[RestoreStep]:
    """The steps that every restore begins with, ``fit`` before the plan, and others before the check of the target."""
    lock = FunctionStep("acquire the restore lock", acquire_restore_lock, release_restore_lock)
    clean_up = FunctionStep("clean up after an interrupted restore", clean_up_interrupted)
    return [
        FunctionStep("connect", connect),
        FunctionStep("read the backup", read_backup),
        fit,
        FunctionStep("plan", plan),
        *([] if options.dry_run else [lock]),
        FunctionStep("look for a resumable restore", find_resumable_restore),
        *([] if options.dry_run else [clean_up]),
        *before_target,
        FunctionStep("check the target", check_target_beside_files),
        FunctionStep("check every file", check_files),
        FunctionStep("look for rows", look_for_rows),
    ]


def ingest_steps(options: RestoreOptions) -> list[RestoreStep]:
    """The steps from the download limit to its end."""
    limit = [FunctionStep("set the download limit", limit_downloads, lift_limit)]
    lift = [FunctionStep("lift the download limit", or_notice(lift_limit))] if options.rate_limit else []
    if options.import_mode:
        limit.append(FunctionStep("enter import mode", while_locked(enter_import_mode), leave_import_mode))
        lift.append(FunctionStep("leave import mode", or_notice(leave_import_mode)))
    return [*limit, FunctionStep("ingest", while_locked(ingest)), *lift]


def runbook(
    options: RestoreOptions,
    checks: list[RestoreStep],
    changes: list[RestoreStep],
    end: Iterable[RestoreStep] = (),
) -> list[RestoreStep]:
    """All steps: ``changes`` are left out by a dry run, and where the target already holds the backup."""
    if options.dry_run:
        return [*checks, FunctionStep("plan the changes", plan_changes)]
    changes = [structs.replace(line, action=_unless_restored(line.action)) for line in changes]
    delete = FunctionStep("delete the restore checkpoint", while_locked(delete_checkpoint))
    return [*checks, *changes, *end, delete, FunctionStep("release the restore lock", release_restore_lock)]


def _unless_restored(action: Callable[[RestoreContext], object]) -> Callable[[RestoreContext], None]:
    def act(context: RestoreContext) -> None:
        if not context.already_restored:
            action(context)

    return act


def connect(context: RestoreContext) -> None:
    """Connect to PD and read the cluster's version and stores."""
    context.cluster = context.clusters.get(context.options.cluster)
    context.info = context.cluster.info(context.reporter)


def read_backup(context: RestoreContext) -> None:
    """Read the backup's own records."""
    options = context.options
    context.backup = BackupSet.open(open_store(options.storage), options.key_mode)
    context.backup.require_full()
    stores_decrypt = options.mode is Mode.INGEST and options.via is not Via.UPLOAD
    if stores_decrypt and options.storage.crypter.encrypts and options.cluster.tls.ca is None:
        context.reporter(Notice(KEY_IN_CLEAR))


def check_fit(context: RestoreContext) -> None:
    """Refuse a backup in another encoding than the cluster's, files that stores cannot ingest, and clusters without checksums."""
    by_stores = context.options.mode is Mode.INGEST and context.via is not Via.UPLOAD
    if by_stores and context.backup.file_kind is not FileKind.SST:
        raise BackupUnsupported(
            "--via stores: stores can only ingest SSTs, but the backup's files are Parquet",
            hint="Leave out --via stores: tikv-br then converts the files. Or pass --mode put, which writes rows as any client does.",
        )
    context.info.require_encoding(context.backup.api_version)
    if context.options.checksum:
        context.cluster.require(versions.CHECKSUMS)
    context.cluster.require(versions.WRITES)


_TICDC = "ticdc"


def txn_restore_steps(options: RestoreOptions) -> list[RestoreStep]:
    """The runbook of transactional data. A dry run ends before the first change."""
    checks = [
        *first_steps(
            options,
            FunctionStep("check that backup and cluster match", check_txn_fit),
            FunctionStep("resolve locks", resolve_locks),
        ),
        FunctionStep("check pairs of files", check_pairs),
        FunctionStep("check timestamps", choose_timestamp),
        FunctionStep("check for followers", report_txn_followers),
    ]
    changes = [
        FunctionStep(FIRST_CHANGE, while_locked(save_checkpoint)),
        FunctionStep("split and scatter", while_locked(split)),
        *ingest_steps(options),
    ]
    if options.checksum:
        changes.append(FunctionStep("compare checksums", compare_txn))
    return runbook(options, checks, changes)


def check_txn_fit(context: RestoreContext) -> None:
    """Refuse clusters without transactions, and those that cannot rewrite keys or many rows."""
    if context.info.api_version is ApiVersion.V1TTL:
        raise ApiVersionMismatch(
            "the cluster runs API v1ttl, which has no transactions", hint="Restore into a cluster of API v1 or v2."
        )
    options = context.options
    is_other_version = context.info.api_version is not context.backup.api_version
    context.cluster.require(versions.WRITES)
    if options.allow_overwrite:
        context.reporter(
            Notice(
                "--allow-overwrite: rows of the target that the backup does not have stay; with any such row the range is no snapshot, "
                "and programs such as JuiceFS may damage their data"
            )
        )
    is_moved = is_other_version or options.to_keyspace or options.rewrite_prefix != (b"", b"")
    if is_moved and context.via is not Via.UPLOAD:
        context.cluster.require(versions.TXN_REWRITE)
    if not options.checksum and options.restamp is Restamp.NEVER:
        raise UsageError(
            "--keep-timestamps cannot be combined with --no-checksum: deletes in the target can hide rows, which only the checksum shows",
            hint="Omit one of them.",
        )


def check_pairs(context: RestoreContext) -> None:
    """Refuse files that do not belong together: each row is in the file with its value, and its commit in the other one.

    Rows with a GC fence, which readers of the target would not see, are uploaded without it.
    """
    fenced = 0
    for part in context.todo:
        facts, expected = context.facts[part.file.name], part.totals.total_kvs
        if facts.rows != expected:
            raise rows_differ(part.file, facts.rows, expected)
        if facts.fences and context.options.via is Via.STORES:
            raise BackupUnsupported(
                f"{part.file.name} has {facts.fences} rows with a GC fence, which would not be visible after the restore",
                hint="Leave out --via stores: tikv-br then uploads the rows of this file without the fences.",
            )
        fenced += facts.fences
    if fenced:
        context.reporter(
            Notice(f"tikv-br uploads the files of {counted(fenced, 'row')} with a GC fence, and removes it")
        )


def resolve_locks(context: RestoreContext) -> None:
    """Resolve the locks of ended transactions in the target. Raises `TargetNotEmpty` for a transaction that is alive."""
    resolver, now = LockResolver(context.cluster), context.cluster.pd.tso()
    for each in context.wanted:
        report = resolver.resolve(each.target, now)
        if report.live:
            raise TargetNotEmpty(
                f"clients write to the target: there is {report.live[0]}",
                hint="Stop all clients of the target, then run the same command again.",
            )


def choose_timestamp(context: RestoreContext) -> None:
    """Choose the new timestamp of all rows, unless they keep their own or a resumed restore has chosen one."""
    if context.restamp_ts or not context.todo:
        return
    now = context.cluster.pd.tso()
    if context.options.restamp is not Restamp.NEVER:
        context.restamp_ts = now
        context.reporter(Notice(f"all rows get the new timestamp {show_ts(now)}"))
        check_target(context)  # rows that were written since it was checked would be hidden
    elif (ts := context.backup.backup_ts) > now:
        raise TimestampAheadOfTso(
            f"the backup has rows up to ts {ts}, {seconds_between(now, ts):.1f} s ahead of the target's TSO"
        )


def report_txn_followers(context: RestoreContext) -> None:
    """Report replications of the cluster, which do not get the rows. Nothing announces an ingest of transactional data to them."""

    def find(cluster: Cluster) -> list[str]:
        now = cluster.pd.tso() >> 18
        services = gc_status(cluster.pd_http).services
        return [each.service for each in services if each.service.startswith(_TICDC) and each.expires * 1000 > now]

    notice_followers(context, find, "restored rows reach no change feed; TiCDC, with these safe points, gets none")


@forget_if_different
def compare_txn(context: RestoreContext) -> None:
    """Compare the target with the backup. Deletes in the target may have hidden rows that keep their timestamps."""
    try:
        compare_all(context, comparison_of(context))
    except ChecksumMismatch as error:
        hint = f"{error.hint} {SAME_COMMAND}"
        if not context.restamp_ts:
            hint = (
                "If rows are missing, newer deletes in the target hide them. Delete the range physically (KvDeleteRange) and run the same "
                "command again, or run it without --keep-timestamps: either restores all rows again."
            )
        raise ChecksumMismatch(error.message, hint=hint) from None


class RestoreSummary(Struct, frozen=True):
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
    keyspaces: tuple[int, ...]
    """Ids in the backup of what was restored; empty before API V2."""
    keyspace_names: tuple[str, ...]
    target_keyspaces: tuple[int, ...]
    """Ids of the keyspaces restored into, in the order of `keyspaces` if that is not empty."""
    target_keyspace_names: tuple[str, ...]
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
    manifest, recorded = context.backup.manifest, _recorded_names(context)
    pairs = sorted((source.keyspace_id, target.keyspace_id) for target, source in context.keyspaces.items())
    sources = [source for source, _ in pairs] if context.backup.api_version is ApiVersion.V2 else []
    targets = [target for _, target in pairs] if context.info.api_version is ApiVersion.V2 else []
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
        keyspaces=tuple(sources),
        keyspace_names=tuple(recorded.get(each, "") for each in sources),
        target_keyspaces=tuple(targets),
        target_keyspace_names=tuple(context.names.get(each, "") for each in targets),
        storage=context.backup.store.location.redacted(),
        cluster_id=context.info.cluster_id,
        dry_run=options.dry_run,
        session_seconds=round(context.session_seconds, 3),
        step_seconds={name: round(value, 3) for name, value in timings.items()},
        overlap_seconds={name: round(value, 3) for name, value in context.overlap_seconds.items()},
    )


def check_target_alone(options: RestoreOptions) -> list[tuple[KeyRange, RowLimits]]:
    """Raise what a restore of this backup would raise about its target, without a look at files or earlier restores; returns `limits_of_ranges`."""
    context = RestoreContext(structs.replace(options, checksum=False), silent)
    with context.clusters, contextlib.closing(context):
        for check in (connect, read_backup, check_fit, plan, check_target):
            check(context)
        context.todo = context.parts
        if options.mode is Mode.INGEST:
            check_followers(context)
        return limits_of_ranges(context)


class AbortedRestores(Struct, frozen=True):
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
    """The restores with records in ``store`` that began in this cluster, as its marks prove: another id may belong to a running one."""
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
