"""The steps of a restore. If one fails, the earlier ones are undone.

Ingested rows stay in the target when a restore fails: the same command resumes it. Removing them is the operator's decision.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import chain

from tikv_br import run_id
from tikv_br.backupset import lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of, describe_ranges, keyspace_codec, nothing_matched
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.rows import has_rows
from tikv_br.cancellation import run_on_threads
from tikv_br.cluster import timestamps, versions
from tikv_br.cluster.cluster import first_rpc_key
from tikv_br.cluster.import_mode import DownloadLimit
from tikv_br.cluster.ingest_announcer import Announcer, foreign_followers, unfinished
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.split import scatter, split_at
from tikv_br.cluster.timestamps import show_ts
from tikv_br.compare.files import BackgroundComparison, BackupComparison, FilePart
from tikv_br.errors import (
    BackupDamaged,
    BackupUnsupported,
    ChecksumMismatch,
    ClusterError,
    ClusterFollowed,
    ClusterUnreachable,
    EtcdUnreachable,
    LeaseHeld,
    RetryBudgetExhausted,
    StorageDenied,
    StorageError,
    StorageReadOnly,
    TargetNotEmpty,
    TikvBrError,
    TimestampAheadOfTso,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, intersection, subtract
from tikv_br.formats.keys.rewrite import UNCHANGED, Rewrite, can_stores_rewrite
from tikv_br.formats.keys.text import show_both
from tikv_br.progress_events import Notice
from tikv_br.report.facts import counted
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.ingest import IngestJob, ingest_part
from tikv_br.restore.inspect import BackgroundInspection
from tikv_br.restore.options import Mode, Restamp, RestoreOptions, Via
from tikv_br.restore.plan import IngestResult, RestorePlan, RestoreRange, choose_parts, split_keys
from tikv_br.restore.put import PutJob, put_part
from tikv_br.restore.resume import (
    clean_up_interrupted,
    delete_checkpoint,
    enter_import_mode,
    find_resumable_restore,
    leave_import_mode,
    may_hold_rows,
    record_of,
    save_checkpoint,
)
from tikv_br.steps import FunctionStep, Step
from tikv_br.storage.credentials import KEY_IN_CLEAR, to_backend, to_cipher_info
from tikv_br.storage.open import open_store
from tikv_br.tasks.executor import choose_executor, run_tasks
from tikv_br.tasks.task import TaskContext


def plan(context: RestoreContext) -> None:
    """Choose the wanted parts of the files. Raises `UsageError` where there are none, or no store can rename them so."""
    options, backup = context.options, context.backup
    rewriting = bool(options.to_keyspace) or options.rewrite_prefix != (b"", b"")
    partial = options.span != EVERY_KEY or rewriting or options.keyspace is not None
    moved_to = _keyspace(context)
    for whole in backup.ranges:
        span, rewrite = whole, UNCHANGED
        if partial:
            codec = codec_of(backup.api_version, whole)
            if options.keyspace not in {None, codec.keyspace_id}:
                continue
            span = intersection(span, codec.rpc_range(options.span))
            rewrite = _rewrite(context, codec, moved_to or codec)
            span = intersection(span, rewrite.source)
        if not span.is_empty:
            context.wanted.append(RestoreRange(span, rewrite))
    if not context.wanted:
        raise UsageError(
            "the backup contains no part of the requested range",
            hint="Check the ranges that the backup covers in its manifest.",
        )
    if options.to_keyspace and len({each.rewrite.old for each in context.wanted}) > 1:
        raise UsageError(
            "--to-keyspace: the backup has several keyspaces, which cannot be restored into one",
            hint="Choose one with --keyspace.",
        )
    context.parts = choose_parts(backup.files, context.wanted)


def plan_changes(context: RestoreContext) -> None:
    """Make the plan of a dry run; asks PD for the target's regions."""
    codec, pd = KeyCodec(context.backup.api_version), context.cluster.pd
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


def _keyspace(context: RestoreContext) -> KeyCodec | None:
    """The keyspace to move to, by id or by name; None = none was asked for."""
    wanted = context.options.to_keyspace
    if not wanted:
        return None
    return keyspace_codec(context.info.api_version, context.cluster.pd.keyspace_id(wanted), "--to-keyspace")


def _rewrite(context: RestoreContext, source: KeyCodec, target: KeyCodec) -> Rewrite:
    old, new = context.options.rewrite_prefix
    rewrite = Rewrite.of(source, old, target, new)
    by_stores = context.options.mode is Mode.INGEST and context.via is not Via.UPLOAD
    if by_stores and not can_stores_rewrite(source.api_version, rewrite):
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


def or_notice(action: Callable[[RestoreContext], object]) -> Callable[[RestoreContext], None]:
    """Wrap an optional action: a `ClusterError` is reported, not raised, because its effects expire."""

    def act(context: RestoreContext) -> None:
        try:
            action(context)
        except ClusterError as error:
            context.reporter(Notice(error.message))

    return act


def while_locked(action: Callable[[RestoreContext], None]) -> Callable[[RestoreContext], None]:
    """Renew the lease before an action that only its holder may take. Raises `LeaseLost`, `StorageError`."""

    def act(context: RestoreContext) -> None:
        if context.lease is not None:
            context.lease.confirm()
        action(context)

    return act


def ingest(context: RestoreContext) -> None:
    """Have the stores download and ingest every part."""
    if context.announcer is not None:
        context.announcer.begin(context.restamp_ts)
    options, backup, tasks = context.options, context.backup, len(context.todo)
    limit = RateLimit(options.rate_limit)
    executor = options.executor.executor if options.executor.executor != "auto" else choose_executor(tasks)
    largest = max((part.file.size for part in context.todo), default=0)
    job = IngestJob(
        cluster=options.cluster,
        api_version=backup.api_version,
        store=backup.store,
        via=context.via,
        backend=_backend(context),
        cipher_info=to_cipher_info(options.storage).SerializeToString(),
        upload_limit=limit.share(executor, options.concurrency, tasks),
        slow_seconds=limit.seconds(options.concurrency * largest),  # concurrent transfers share a store's limit
        new_timestamp=context.restamp_ts,
        record=context.record,
    )
    _run(context, partial(ingest_part, job))


def _backend(context: RestoreContext) -> bytes:
    """The address of the files for the stores; empty if they do not read them."""
    options = context.options
    if context.via is Via.UPLOAD:
        return b""
    return to_backend(options.storage, send_credentials=options.send_credentials).SerializeToString()


def put(context: RestoreContext) -> None:
    """Read every part and put its rows."""
    job = PutJob(context.options.cluster, context.backup.api_version, context.backup.store, context.record)
    _run(context, partial(put_part, job))


def _run(context: RestoreContext, transfer: Callable[[FilePart, TaskContext], IngestResult]) -> None:
    """Run a task per part. Each restored part is compared in the background while others are restored."""
    parts, options = context.todo, context.options
    if options.checksum:
        context.comparing = BackgroundComparison(_comparison(context), options.concurrency)
    done = 0

    def on_result(result: tuple[FilePart, IngestResult]) -> None:
        nonlocal done
        done += 1
        context.add_result(*result)

    try:
        context.session_seconds = run_tasks(
            parts,
            partial(_transfer_part, transfer),
            options=options.executor,
            on_result=on_result,
            name_of=str,
            reporter=context.reporter,
            shared=[context.clusters],
            planned_bytes=[part.file.total_bytes for part in parts],
        )
    except BackupDamaged as error:
        error.hint = (
            f"The target already holds {done} of the {counted(len(parts), 'file')} to restore, and maybe rows of other files. "
            "Once `tikv-br verify` finds the backup sound, run the same command again to resume. "
            "To abandon the restore, delete the range and run `tikv-br abort --restores`."
        )
        raise
    if context.comparing is not None:
        context.overlap_seconds["compare checksums"] = context.comparing.seconds_until(time.monotonic())


def _transfer_part(
    transfer: Callable[[FilePart, TaskContext], IngestResult], part: FilePart, task: TaskContext
) -> tuple[FilePart, IngestResult]:
    return part, transfer(part, task)


def _comparison(context: RestoreContext) -> BackupComparison:
    cuts = {name: facts.cuts for name, facts in context.facts.items()}
    backup = context.backup
    return BackupComparison(
        context.cluster,
        backup.store,
        backup.api_version,
        cuts,
        expiry_recorded=backup.expiry_recorded,
        others=context.others if context.options.allow_overwrite else None,
    )


FIRST_CHANGE = "save the restore checkpoint"
"""The step before which nothing of the target changes."""

SCATTER_SECONDS = 60.0
"""Seconds to wait for new regions to spread; without it a restore is only slower."""


def restore_steps(options: RestoreOptions) -> list[Step[RestoreContext]]:
    """The runbook. A dry run ends before the first change."""
    checks = [
        FunctionStep("connect", connect),
        FunctionStep("read the backup", read_backup),
        FunctionStep("check that backup and cluster match", check_fit),
        FunctionStep("plan", plan),
        *(
            []
            if options.dry_run
            else [FunctionStep("acquire the restore lock", acquire_restore_lock, release_restore_lock)]
        ),
        FunctionStep("look for a resumable restore", find_resumable_restore),
        *([] if options.dry_run else [FunctionStep("clean up after an interrupted restore", clean_up_interrupted)]),
        FunctionStep("check the target", check_target_beside_files),
        FunctionStep("check every file", check_files),
        FunctionStep("look for rows", look_for_rows),
    ]
    changes = [
        FunctionStep(FIRST_CHANGE, while_locked(save_checkpoint)),
        FunctionStep("split and scatter", while_locked(split)),
    ]
    end = [FunctionStep("release the restore lock", release_restore_lock)]
    if options.mode is Mode.PUT:
        checks.append(FunctionStep("check for followers", report_followers))
        changes.append(FunctionStep("put", while_locked(put)))
    else:
        checks += [
            FunctionStep("check timestamps", check_timestamps),
            FunctionStep("check for followers", check_followers),
        ]
        changes.insert(0, FunctionStep("announce the ingest", while_locked(announce), abandon_announcement))
        end.insert(0, FunctionStep("announce its end", finish_announcement))
        limit = [FunctionStep("set the download limit", limit_downloads, lift_limit)]
        lift = [FunctionStep("lift the download limit", or_notice(lift_limit))] if options.rate_limit else []
        if options.import_mode:
            limit.append(FunctionStep("enter import mode", while_locked(enter_import_mode), leave_import_mode))
            lift.append(FunctionStep("leave import mode", or_notice(leave_import_mode)))
        changes += [
            *limit,
            FunctionStep("ingest", while_locked(ingest)),
            *lift,
            FunctionStep("flush timestamps", flush_restored),
        ]
    if options.checksum:
        changes.append(FunctionStep("compare checksums", compare))
    changes = [replace(line, action=_unless_restored(line.action)) for line in changes]
    if options.dry_run:
        return [*checks, FunctionStep("plan the changes", plan_changes)]
    *announced, release = end
    delete = FunctionStep("delete the restore checkpoint", while_locked(delete_checkpoint))
    return [*checks, *changes, *announced, delete, release]


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
    context.backup = BackupSet.open(open_store(options.storage))
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


def check_target(context: RestoreContext) -> None:
    """Refuse a target with rows, except with `allow_overwrite`, from an unfinished restore, or if it already holds the backup."""
    if context.options.allow_overwrite or context.already_restored:
        return
    for span in subtract((each.target for each in context.wanted), may_hold_rows(context)):
        codec = codec_of(context.backup.api_version, span)
        first = first_rpc_key(context.cluster, codec.keyspace_id, span)
        if first is None:
            continue
        if context.checkpoint is None and _holds_backup(context):
            context.already_restored, context.todo = True, []
            context.reporter(Notice("The target already holds this backup; nothing to do."))
            return
        where = describe_ranges(context.backup.api_version, [span])
        raise TargetNotEmpty(
            f"the target is not empty in the range {where}: its first key there is {show_both(codec.user_key(first))}"
        )


def check_target_beside_files(context: RestoreContext) -> None:
    """Check the target while the files are inspected in the background: neither needs the other."""
    options = context.options
    files = list({part.file.name: part.file for part in context.todo}.values())
    context.inspection = BackgroundInspection(context.backup, files, options.file_check, options.concurrency)
    check_target(context)
    context.overlap_seconds["check every file"] = context.inspection.seconds_until(time.monotonic())


def _holds_backup(context: RestoreContext) -> bool:
    """Return whether the target holds exactly the requested rows, as after a restore killed after its last change.

    The comparison ends at the first file that differs.
    """
    if not context.options.checksum:
        return False
    comparison = _comparison(context)
    if any(comparison.compare_empty(gap) for gap in _gaps(context)):
        return False
    try:
        context.found = comparison.require_all_equal(context.parts, context.options.concurrency, exact=True)
    except ChecksumMismatch:
        return False
    return True


def _gaps(context: RestoreContext) -> list[KeyRange]:
    """The ranges of the target of which the backup has no file."""
    return subtract((each.target for each in context.wanted), [part.target for part in context.parts])


def check_files(context: RestoreContext) -> None:
    """Wait until every file is inspected: no store sees one before.

    If that took longer than the check of the target, the target is checked again: it may have received rows in between.
    """
    if context.inspection is None or context.already_restored:
        return
    took_longer = not context.inspection.is_done
    context.facts = context.inspection.result()
    if took_longer:
        check_target(context)


def look_for_rows(context: RestoreContext) -> None:
    """Refuse an explicit range, keyspace or prefix of which the backup has no row. Raises `NothingMatched`."""
    options, backup = context.options, context.backup
    explicit = options.span != EVERY_KEY or options.keyspace is not None or options.rewrite_prefix != (b"", b"")
    spans = [each.span for each in context.wanted]
    if explicit and not options.allow_empty and not has_rows(backup, spans):
        raise nothing_matched("the backup", backup.api_version, spans)


def check_timestamps(context: RestoreContext) -> None:
    """Find out whether rows need a new timestamp: deletes in the target may be newer, or they are newer than its TSO (API V2)."""
    if context.backup.api_version is not ApiVersion.V2 or not context.todo:
        return
    if context.restamp_ts:  # a resumed restore keeps the timestamp that it has chosen
        context.restamp_reason = "as before the interruption"
        return
    newest = max((facts.max_ts for facts in context.facts.values()), default=0)
    now = context.cluster.pd.tso() if newest else 0
    ahead = f"the backup's newest row has ts {newest}, {_seconds_between(now, newest):.1f} s ahead of the target's TSO"
    match context.options.restamp:
        case Restamp.ALWAYS:
            context.restamp_reason = "--restamp always"
        case Restamp.AUTO if context.backup.cluster_id == context.info.cluster_id:
            context.restamp_reason = (
                "the backup is of this cluster, and deletes since then would hide rows with their own timestamps"
                if context.options.command != "load raw"
                else "deletes of the same keys in the target may be newer than the loaded files, and would hide rows"
            )
        case Restamp.AUTO if newest > now:
            context.restamp_reason = ahead
        case Restamp.NEVER if newest > now:
            raise TimestampAheadOfTso(ahead)
        case _:
            return
    if context.options.dry_run:
        _choose_timestamp(context)


def check_followers(context: RestoreContext) -> None:
    """Refuse a target with followers that would not learn of the rows. Raises `ClusterFollowed`."""
    if not _is_announced(context) or context.options.allow_followers:
        return
    if found := foreign_followers(context.cluster):
        raise ClusterFollowed(
            f"rows that stores ingest reach no change feed, and these followers of the cluster would not notice: {', '.join(found)}"
        )


def report_followers(context: RestoreContext) -> None:
    """Report that followers, because of which an ingest would be refused, get rows that are put."""
    if not _is_announced(context):
        return
    try:
        found = foreign_followers(context.cluster)
    except TikvBrError as error:  # it is only a notice
        log.debug("cannot look for followers: %s", error.message)
        return
    if found:
        context.reporter(Notice(f"followers of the cluster get these rows, as they are put: {', '.join(found)}"))


def _is_announced(context: RestoreContext) -> bool:
    """Return whether followers can exist: only API V2 has change feeds."""
    return context.backup.api_version is ApiVersion.V2 and bool(context.todo)


def announce(context: RestoreContext) -> None:
    """Announce the ingest to followers of the cluster, then choose the new timestamp: see `tikv_br.cluster.ingests`."""
    if not _is_announced(context):
        return
    restore_id = context.record.id if context.record is not None else run_id.current_or_new()
    spans = [each.target for each in context.wanted]
    context.announcer = Announcer.start(context.cluster, context.options.command, restore_id, spans)
    if context.restamp_reason and not (context.restamp_ts and context.announcer.found_unfinished):
        _choose_timestamp(context)
        check_target(context)


def _choose_timestamp(context: RestoreContext) -> None:
    context.restamp_ts = _new_timestamp(context)
    context.reporter(Notice(f"all rows get the new timestamp {show_ts(context.restamp_ts)}: {context.restamp_reason}"))


def finish_announcement(context: RestoreContext) -> None:
    """Announce that all rows are in; also for an earlier run that was killed before it could."""
    if context.announcer is not None:
        try:
            context.announcer.finish()
        except (ClusterUnreachable, RetryBudgetExhausted, EtcdUnreachable) as error:
            error.hint = "All rows are in the target. Left to do: followers of the cluster wait for the announcement of its end. Run the same command again once PD answers; it restores nothing twice."
            raise
    elif context.backup.api_version is ApiVersion.V2 and context.record is not None:
        found = context.cluster.ingests.read()
        if unfinished(found, context.record.id) is not None:
            Announcer.start(context.cluster, context.options.command, context.record.id, ()).finish()


def abandon_announcement(context: RestoreContext) -> None:
    """Withdraw the announcement after a failure, unless files may have been ingested."""
    announcer, context.announcer = context.announcer, None
    if announcer is not None:
        announcer.abandon()


def _seconds_between(first: int, last: int) -> float:
    return (timestamps.physical_ms(last) - timestamps.physical_ms(first)) / 1000


def _new_timestamp(context: RestoreContext) -> int:
    """A timestamp above all finished writes and below all later ones: the stores drop their cached timestamps.

    A check of the target after this sees every row that an ingest with it could hide.
    """
    ts = context.cluster.pd.tso()
    if not context.options.dry_run:
        flush_timestamps(context)
    return ts


def split(context: RestoreContext) -> None:
    """Split the target into regions of about 96 MiB, and scatter them so that all stores ingest at once."""
    codec = KeyCodec(context.backup.api_version)
    context.regions_made = split_at(context.cluster, codec, split_keys(context.todo, context.options.region_bytes))
    if not context.regions_made:
        return
    try:
        left = scatter(context.cluster, context.regions_made, SCATTER_SECONDS)
    except ClusterError as error:  # an uneven cluster is no reason to fail a restore
        context.reporter(Notice(f"the new regions could not be scattered over the stores: {error.message}"))
        return
    if left:
        context.reporter(
            Notice(f"{len(left)} of {len(context.regions_made)} new regions were not moved to other stores")
        )


def limit_downloads(context: RestoreContext) -> None:
    """Set the download limit of every store; without --ratelimit, remove one that a killed restore has left."""
    name = f"tikv-br-restore-{run_id.current_or_new()}"
    context.download_limit = DownloadLimit(context.cluster, context.options.rate_limit, name)
    context.download_limit.start()


def lift_limit(context: RestoreContext) -> bool:
    """Remove the download limit, also after a failure. Returns whether there was one."""
    limit, context.download_limit = context.download_limit, None
    if limit is None:
        return False
    limit.stop()
    return context.options.rate_limit > 0


def flush_timestamps(context: RestoreContext) -> None:
    """Make the stores drop cached timestamps, which may be older than the restored rows."""
    if context.backup.api_version is ApiVersion.V2:
        context.cluster.flush_timestamps()


LEFT_TO_DO = (
    "All rows are in the target{compared}. Left to do: the stores must drop their cached timestamps, which needs PD. "
    "Run the same command again once PD answers; it restores nothing twice."
)


def flush_restored(context: RestoreContext) -> None:
    """Call `flush_timestamps` after the ingest. If PD does not answer, the error states that only this is missing."""
    try:
        flush_timestamps(context)
    except (ClusterUnreachable, RetryBudgetExhausted) as error:
        compared = ""
        if context.options.checksum:
            compare(context)
            compared = " and equal to the backup's"
        error.hint = LEFT_TO_DO.format(compared=compared)
        raise


def compare(context: RestoreContext) -> None:
    """Compare the cluster with the backup; rows that newer deletes hide are ingested again."""
    comparison = _comparison(context)
    try:
        context.found = _compare_all(context, comparison)
    except ChecksumMismatch as error:
        if not ingest_hidden(context, comparison):
            raise ChecksumMismatch(error.message, hint=_hint(context, error)) from None
        try:
            context.found = _compare_all(context, comparison)
        except ChecksumMismatch as again:
            hint = "Stop all clients that delete or write these keys in the target, then run the same command again."
            raise ChecksumMismatch(again.message, hint=hint) from None
    if context.options.allow_overwrite:
        context.others.update({("", gap): comparison.count_rows(gap) for gap in _gaps(context)})


def _compare_all(context: RestoreContext, comparison: BackupComparison) -> Checksum:
    """The checksum of all parts; those that were found equal during the ingest are not compared again."""
    equal: dict[tuple[str, KeyRange], Checksum] = {}
    if context.comparing is not None:
        equal = context.comparing.finish()
        context.comparing = None
    left = [part for part in context.parts if (part.file.name, part.span) not in equal]
    return reduce(Checksum.merge, equal.values(), comparison.require_all_equal(left, context.options.concurrency))


def ingest_hidden(context: RestoreContext, comparison: BackupComparison) -> bool:
    """Ingest the parts again, with a newer timestamp, whose rows newer deletes hide; False if anything else differs.

    Raises `ChecksumMismatch` if rows are to keep their own timestamps.
    """
    options = context.options
    if options.mode is not Mode.INGEST or context.backup.api_version is not ApiVersion.V2:
        return False
    ts = _new_timestamp(context) if options.restamp is not Restamp.NEVER else 0
    parts, rows = _hidden(context, comparison)
    if not parts:
        return False
    found = f"newer deletes of the same keys in the target hide {counted(rows, 'restored row')}"
    if not ts:
        raise ChecksumMismatch(
            f"{found}: with --restamp never, restored rows keep their older timestamps",
            hint="Run the same command again with --restamp auto: the rows get a new timestamp and become visible.",
        )
    context.reporter(Notice(f"{found}: these rows are ingested again with the new timestamp {show_ts(ts)}"))
    context.restamp_ts = ts
    save_checkpoint(context)
    todo, done, context.todo = context.todo, context.done, parts
    limit_downloads(context)
    while_locked(ingest)(context)
    or_notice(lift_limit)(context)
    flush_timestamps(context)
    context.todo, context.done = todo, done
    return True


def _hidden(context: RestoreContext, comparison: BackupComparison) -> tuple[list[FilePart], int]:
    """The parts that differ, and how many of their rows newer deletes hide; none if anything else differs."""
    threads = context.options.concurrency
    answers = run_on_threads(comparison.compare, context.parts, threads, "compare")
    parts = [part for part, (_, difference) in zip(context.parts, answers, strict=True) if difference]
    rows = run_on_threads(comparison.hidden_rows, parts, threads, "compare")
    return (parts, sum(rows)) if all(rows) else ([], 0)


def _hint(context: RestoreContext, mismatch: ChecksumMismatch) -> str:
    hint = mismatch.hint
    if context.resumed:
        hint = f"{hint} If rows were deleted since the restore began, pass --no-resume."
    if context.options.allow_overwrite and context.options.mode is Mode.INGEST and not context.restamp_ts:
        hint = f"{hint} If the backup's rows must replace newer rows of the target, pass --restamp always."
    return hint
