"""Restore as a runbook: each step is one line of it, and takes back what it did when a later one fails.

What was ingested stays when a restore fails: it is what the backup says, and the same command goes on from there. To
remove it is the operator's decision.
"""

from __future__ import annotations

from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from tikv_br import run_id
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import subtract
from tikv_br.backupset.files import FileKind
from tikv_br.cluster import timestamp
from tikv_br.cluster.download_limit import DownloadLimit
from tikv_br.cluster.first_key import first_rpc_key
from tikv_br.cluster.shared import shared_cluster
from tikv_br.cluster.split import scatter, split_at
from tikv_br.errors import (
    BackupUnsupported,
    ChecksumMismatch,
    ClusterError,
    TargetNotEmpty,
    TimestampAheadOfTso,
)
from tikv_br.progress_events import Notice
from tikv_br.proof.fit import check_gives_checksums, check_same_encoding
from tikv_br.proof.prover import Prover
from tikv_br.proof.ranges import codec_of
from tikv_br.restore.bring import ingest, put
from tikv_br.restore.choose import plan, work_out
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.exclusion import exclude_others, let_others_in, while_held
from tikv_br.restore.import_mode import enter_import_mode, leave_import_mode, put_back
from tikv_br.restore.inspect import inspect_files
from tikv_br.restore.options import Mode, RestoreOptions, Via
from tikv_br.restore.plan import split_keys
from tikv_br.restore.resume import begin, find_unfinished, finish, may_hold_rows
from tikv_br.steps import Line, Step
from tikv_br.storage.backend import KEY_IN_CLEAR
from tikv_br.storage.open import open_store

FIRST_CHANGE = "write down the beginning"
"""The step before which nothing of the target changes."""

SCATTER_SECONDS = 60.0
"""How long to wait for new regions to spread; a restore works without, only slower."""


def restore_steps(options: RestoreOptions) -> list[Step[RestoreContext]]:
    """The runbook. A dry run ends before the first change."""
    checks = [
        Line("connect", connect),
        Line("read the backup", read_backup),
        Line("check that backup and cluster fit", check_fit),
        Line("plan", plan),
        *([] if options.dry_run else [Line("keep other restores out", exclude_others, let_others_in)]),
        Line("look for an unfinished restore", find_unfinished),
        *([] if options.dry_run else [Line("put back what a killed restore left", put_back)]),
        Line("check the target", check_target),
        Line("check every file", check_files),
    ]
    changes = [
        Line(FIRST_CHANGE, while_held(begin)),
        Line("split and scatter", while_held(split)),
    ]
    if options.mode is Mode.PUT:
        changes.append(Line("put", while_held(put)))
    else:
        checks.append(Line("check timestamps", check_timestamps))
        limit = [Line("limit downloads", limit_downloads, lift_limit)] if options.rate_limit else []
        lift = [Line("lift the limit", lift_limit)] if options.rate_limit else []
        if options.import_mode:
            limit.append(Line("enter import mode", while_held(enter_import_mode), leave_import_mode))
            lift.append(Line("leave import mode", leave_import_mode))
        changes += [*limit, Line("ingest", while_held(ingest)), *lift, Line("flush timestamps", flush_timestamps)]
    proof = [Line("compare checksums", compare)] if options.checksum else []
    end = [Line("let other restores in", let_others_in)]
    if options.dry_run:
        return [*checks, Line("work out what would be done", work_out)]
    return [*checks, *changes, *proof, Line("forget what was written down", while_held(finish)), *end]


def connect(context: RestoreContext) -> None:
    """Reach PD and learn what the cluster is."""
    context.cluster = shared_cluster(context.options.cluster)
    context.info = context.cluster.info()


def read_backup(context: RestoreContext) -> None:
    """Read the backup's own records."""
    options = context.options
    context.backup = BackupSet.open(open_store(options.storage))
    stores_decrypt = options.mode is Mode.INGEST and options.via is not Via.UPLOAD
    if stores_decrypt and options.storage.crypter.encrypts and options.cluster.tls.ca is None:
        context.reporter(Notice(KEY_IN_CLEAR))


def check_fit(context: RestoreContext) -> None:
    """Refuse a backup in another encoding than the cluster's, files that it cannot take in, a checksum it cannot give."""
    by_stores = context.options.mode is Mode.INGEST and context.via is not Via.UPLOAD
    if by_stores and context.backup.file_kind is not FileKind.SST:
        raise BackupUnsupported(
            "stores take in SSTs only, and the backup's files are Parquet",
            hint="Leave out --via stores: SSTs are made of them here. Or say --mode put, which writes rows as any client does.",
        )
    check_same_encoding(context.backup.api_version, context.info)
    if context.options.checksum:
        check_gives_checksums(context.info, hint="Say --no-checksum, or use 6.1.1 on.")


def check_target(context: RestoreContext) -> None:
    """Refuse to restore over data, unless told to, or unless it stems from the unfinished restore."""
    if context.options.allow_overwrite:
        return
    for span in subtract((each.target for each in context.wanted), may_hold_rows(context)):
        keyspace = codec_of(context.backup.api_version, span).keyspace_id
        first = first_rpc_key(context.cluster, keyspace, span.start, span.end)
        if first is not None:
            raise TargetNotEmpty(f"the target holds data in {span}: its first key is {first.hex()}")


def check_files(context: RestoreContext) -> None:
    """Look at every file before a store sees any, then at the target once more: others may have begun to fill it meanwhile."""
    options = context.options
    files = list({part.file.name: part.file for part in context.todo}.values())
    context.facts = inspect_files(context.backup, files, options.file_check, options.concurrency)
    check_target(context)


def check_timestamps(context: RestoreContext) -> None:
    """Refuse, or stamp anew, rows from the target's future: they would hide what is written until its TSO has passed them."""
    if context.restamp_ts:
        return  # an unfinished restore has begun to
    newest = max((facts.max_ts for facts in context.facts.values()), default=0)
    now = context.cluster.pd.tso() if newest else 0
    if newest <= now:
        return
    if not context.options.restamp:
        ahead = (timestamp.physical_ms(newest) - timestamp.physical_ms(now)) / 1000
        raise TimestampAheadOfTso(f"the backup's newest row has ts {newest}, {ahead:.1f} s ahead of the target's TSO")
    context.restamp_ts = now
    context.reporter(Notice(f"the backup's rows are newer than the target's TSO: all of them get timestamp {now}"))


def split(context: RestoreContext) -> None:
    """Make a region for about every 96 MiB, and have PD spread them so that ingest runs on all stores at once."""
    codec = KeyCodec(context.backup.api_version)
    context.regions_made = split_at(context.cluster, codec, split_keys(context.todo, context.options.region_bytes))
    if not context.regions_made:
        return
    try:
        left = scatter(context.cluster, context.regions_made, SCATTER_SECONDS)
    except ClusterError as error:  # an uneven cluster is no reason to fail a restore
        context.reporter(Notice(f"the new regions were not spread over the stores: {error.message}"))
        return
    if left:
        context.reporter(Notice(f"{len(left)} of {len(context.regions_made)} new regions stay where they were made"))


def limit_downloads(context: RestoreContext) -> None:
    """Have every store download no faster than was asked for."""
    name = f"tikv-br-restore-{run_id.current_or_new()}"
    context.download_limit = DownloadLimit(context.cluster, context.options.rate_limit, name)
    context.download_limit.start()


def lift_limit(context: RestoreContext) -> None:
    """Let stores download as fast as they can again; also when the restore has failed."""
    limit, context.download_limit = context.download_limit, None
    if limit is not None:
        limit.stop()


def flush_timestamps(context: RestoreContext) -> None:
    """Have the stores stamp the next writes above the restored rows: their cached timestamps may lie below."""
    if context.backup.api_version is ApiVersion.V2:
        context.cluster.flush_timestamps()


def compare(context: RestoreContext) -> None:
    """Compare what the stores now hold with what the backup says."""
    prover = Prover(context.cluster, context.backup.store, context.backup.api_version)
    try:
        context.found = prover.prove_all(context.parts, context.options.concurrency)
    except ChecksumMismatch as error:
        if not context.resumed:
            raise
        hint = "If rows were deleted since the restore began, say --no-resume."
        raise ChecksumMismatch(error.message, hint=f"{error.hint} {hint}") from None
