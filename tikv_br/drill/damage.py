"""The damage that scenarios do on purpose, and the steps that check that it is detected."""

from __future__ import annotations

import random

from tikv_br.backupset import layout
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster import safepoint
from tikv_br.cluster.timestamps import show_ts
from tikv_br.drill.context import DrillContext
from tikv_br.drill.recovery import ownership_reporter
from tikv_br.drill.targets import first_key
from tikv_br.errors import BackupDamaged, DamageNotFound, HandOverNotRefused, SafePointError, UsageError
from tikv_br.report.facts import Compared
from tikv_br.restore.run import restore
from tikv_br.storage.base import ObjectStore, read_chunks
from tikv_br.storage.open import open_store
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

NOT_COPIED = (f"{layout.LEASE}/", f"{layout.RESTORE}/")
"""Locks and state of other operations; they are not part of the backup."""
GC_WORKER = "gc_worker"
"""The service under which GC keeps its own safe point."""
FOREVER = (1 << 63) - 1
SAFE_POINT_SECONDS = 60


def delete_range(context: DrillContext) -> None:
    """Delete the range in the target, in each keyspace of the backup."""
    context.destination.delete(context.options.span)


def copy_damaged(context: DrillContext) -> None:
    """Copy the backup into the drills' home, with one byte of one data file changed, selected by the seed."""
    source, place = open_store(context.location), f"{context.folder}/backup"
    victim, position = _select_byte(context)
    context.damaged = victim.name
    for info in source.list():
        if info.name.startswith(NOT_COPIED):
            continue
        _copy(source, info.name, info.size, context.home, place, position if info.name == victim.name else None)
    context.location = context.options.home.child(place)


def verify_damaged(context: DrillContext) -> None:
    """Raise `DamageNotFound` unless `verify` names the damaged file and no other."""
    found: list[Finding] = []
    try:
        verify(
            VerifyOptions(context.location, Level.FILES, executor="driver"),
            context.recorder.nested,
            found.append,
        )
    except BackupDamaged:
        named = {finding.object for finding in found}
        if named != {context.damaged}:
            raise DamageNotFound(f"{context.damaged} was damaged, and verify reports {sorted(named)}") from None
        causes = "; ".join(finding.cause for finding in found)
        context.compared.append(Compared("verify of the damaged copy", f"detected: {context.damaged}: {causes}", 0, 0))
        return
    raise DamageNotFound(f"verify reports no damage, although a byte of {context.damaged} was changed")


def restore_damaged(context: DrillContext) -> None:
    """Raise `DamageNotFound` unless `restore` refuses the damaged copy before it writes to the target."""
    destination = context.destination
    try:
        restore(destination.restore_options(context.location, context.restore_state), ownership_reporter(context))
    except BackupDamaged as error:
        if context.damaged not in error.message:
            raise DamageNotFound(f"restore does not name {context.damaged}, but reports: {error.message}") from None
        if first_key(context.clusters.get(destination.cluster), destination.ranges) is not None:
            raise DamageNotFound(f"restore refuses {context.damaged}, but has written rows to the target") from None
        context.compared.append(Compared("restore of the damaged copy", f"refused: {error.message}", 0, 0))
        return
    raise DamageNotFound(f"restore accepts {context.damaged}, of which a byte was changed")


def check_has_ts(context: DrillContext) -> None:
    """Refuse a backup without backup-ts: no sync can start from it. Raises `UsageError`."""
    if not context.entry.backup_ts:
        raise UsageError(
            "--scenario stale-safe-point: the backup has no backup-ts, for its source has no timestamps",
            hint="Use a backup of an API V2 cluster.",
        )


def check_sync_can_start(context: DrillContext) -> None:
    """Check that backup-ts can be protected before GC passes it: otherwise a refusal later proves nothing."""
    pd, service, ts = context.clusters.get(context.destination.cluster).pd, _service(context), context.entry.backup_ts
    safepoint.protect(pd, service, ts, SAFE_POINT_SECONDS)
    safepoint.release(pd, service)


def advance_gc(context: DrillContext) -> None:
    """Advance GC's safe point past backup-ts, in the drill's own playground."""
    pd = context.clusters.get(context.destination.cluster).pd
    pd.update_service_safe_point(GC_WORKER, FOREVER, pd.tso())


def check_sync_is_refused(context: DrillContext) -> None:
    """Raise `HandOverNotRefused` unless backup-ts can no longer be protected."""
    pd, ts = context.clusters.get(context.destination.cluster).pd, context.entry.backup_ts
    try:
        safepoint.protect(pd, _service(context), ts, SAFE_POINT_SECONDS)
    except SafePointError as error:
        context.compared.append(Compared("start of a sync after GC", f"refused: {error.message}", 0, 0))
        return
    raise HandOverNotRefused(f"GC has passed backup-ts {show_ts(ts)}, and a sync from it would still start")


def _service(context: DrillContext) -> str:
    return f"tikv-br-drill-{context.id}"


def _select_byte(context: DrillContext) -> tuple[FileEntry, int]:
    files = [file for file in context.backup.files if file.size]
    if not files:
        raise UsageError("the backup has no file to damage", hint="Use a backup that holds rows.")
    chance = random.Random(context.options.seed or 0)  # noqa: S311 - reproducible by its seed
    victim = chance.choice(sorted(files, key=lambda file: file.name))
    return victim, chance.randrange(victim.size)


def _copy(source: ObjectStore, name: str, size: int, home: ObjectStore, place: str, position: int | None) -> None:
    """Copy an object; all bits of the byte at ``position`` are flipped."""
    with home.open_writer(f"{place}/{name}") as writer:
        offset = 0
        for chunk in read_chunks(source, name, size):
            data = bytearray(chunk)
            if position is not None and offset <= position < offset + len(data):
                data[position - offset] ^= 0xFF
            writer.write(data)
            offset += len(data)
        writer.close()
