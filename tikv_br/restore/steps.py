"""The steps of a restore. If one fails, the earlier ones are undone.

Ingested rows stay in the target when a restore fails: the same command resumes it. Removing them is the operator's decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from tikv_br.backupset import lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import keyspace_codec
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.rows import keyspace_in
from tikv_br.cluster import versions
from tikv_br.cluster.keyspaces import chosen_keyspace, matching_keyspace
from tikv_br.errors import (
    BackupUnsupported,
    LeaseHeld,
    StorageDenied,
    StorageError,
    StorageReadOnly,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, intersection
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite, can_stores_rewrite
from tikv_br.formats.keys.text import show_key
from tikv_br.progress_events import Notice
from tikv_br.restore.announce import (
    abandon_announcement,
    announce,
    check_followers,
    check_timestamps,
    finish_announcement,
    report_followers,
)
from tikv_br.restore.comparison import compare, flush_restored
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import Mode, RestoreOptions, Via
from tikv_br.restore.plan import RestorePlan, RestoreRange, choose_parts, split_keys
from tikv_br.restore.resume import (
    clean_up_interrupted,
    delete_checkpoint,
    enter_import_mode,
    find_resumable_restore,
    leave_import_mode,
    record_of,
    save_checkpoint,
)
from tikv_br.restore.target import check_files, check_target_beside_files, look_for_rows
from tikv_br.restore.transfer import ingest, lift_limit, limit_downloads, or_notice, put, split, while_locked
from tikv_br.steps import FunctionStep
from tikv_br.storage.credentials import KEY_IN_CLEAR
from tikv_br.storage.open import open_store


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
    context.parts = choose_parts(backup.pairs, context.wanted)


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
    names = {} if context.backup.manifest is None else context.backup.manifest.description.names
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
        changes += [*ingest_steps(options), FunctionStep("flush timestamps", flush_restored)]
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
    changes = [replace(line, action=_unless_restored(line.action)) for line in changes]
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
