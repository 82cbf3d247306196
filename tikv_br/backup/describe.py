"""What is known of a backup before it is done: for the manifest, and to tell whether a run goes on with another's work."""

from __future__ import annotations

from tikv_br import __version__
from tikv_br.backup.context import BackupContext
from tikv_br.backup.scope import keyspaces_of
from tikv_br.backupset.manifest import Description
from tikv_br.backupset.run_record import RunRecord


def describe(context: BackupContext) -> Description:
    """The backup that this run is to make."""
    conversion, ranges = context.conversion, context.target_ranges
    return Description(
        tool_version=__version__,
        engine=context.engine.name,
        engine_reason=context.engine.reason,
        file_format=context.options.file_kind.value,
        compression=context.options.compression.label,
        cluster_id=context.info.cluster_id,
        cluster_version=context.info.version,
        api_version=conversion.source,
        dst_api_version=conversion.target,
        source_ranges=context.source_ranges,
        ranges=ranges,
        keyspaces=keyspaces_of(conversion.target, ranges),
        backup_ts=context.backup_ts,
        parent="",
        storage=context.options.storage.redacted(),
        encryption=context.options.storage.crypter.method,
        started_ms=context.started_ms,
    )


def run_record(context: BackupContext) -> RunRecord:
    """This run, as another process can go on with it."""
    options = context.options
    losses = tuple(sorted(loss.value for loss in options.allow_loss))
    return RunRecord(context.first_run, describe(context), options.assume_no_ttl, options.checksum, losses)
