"""The steps of the scenario that damages a copy of the backup on purpose: the drill passes only if that is found."""

from __future__ import annotations

import random

from tikv_br.backupset import layout
from tikv_br.backupset.files import FileEntry
from tikv_br.drill.context import DrillContext
from tikv_br.drill.landing import first_key
from tikv_br.drill.recover import claiming
from tikv_br.errors import BackupDamaged, DamageNotFound, UsageError
from tikv_br.report.facts import Compared
from tikv_br.restore.run import restore
from tikv_br.storage.base import ObjectStore, read_chunks
from tikv_br.storage.open import open_store
from tikv_br.verify.options import Executor, Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

NOT_COPIED = (f"{layout.LEASE}/", f"{layout.RESTORE}/")
"""What others do with the backup just now is no part of it."""


def copy_damaged(context: DrillContext) -> None:
    """Copy the backup's objects into the drills' home; one byte of one data file becomes another, by the seed."""
    source, place = open_store(context.place), f"{context.folder}/backup"
    victim, position = _choose(context)
    context.damaged = victim.name
    for info in source.list():
        if info.name.startswith(NOT_COPIED):
            continue
        _copy(source, info.name, info.size, context.home, place, position if info.name == victim.name else None)
    context.location = context.options.home.child(place)


def verify_finds_it(context: DrillContext) -> None:
    """Raise `DamageNotFound` unless `verify` names the damaged file and nothing else."""
    found: list[Finding] = []
    try:
        verify(
            VerifyOptions(context.place, Level.FILES, executor=Executor.DRIVER), context.recorder.inside, found.append
        )
    except BackupDamaged:
        named = {finding.object for finding in found}
        if named != {context.damaged}:
            raise DamageNotFound(f"verify names {sorted(named)}, and {context.damaged} was damaged") from None
        causes = "; ".join(finding.cause for finding in found)
        context.compared.append(Compared("verify on the damaged copy", f"found: {context.damaged}: {causes}", 0, 0))
        return
    raise DamageNotFound(f"verify finds nothing wrong, and a byte of {context.damaged} was changed")


def restore_refuses_it(context: DrillContext) -> None:
    """Raise `DamageNotFound` unless `restore` stops before any store has seen a file."""
    try:
        restore(context.target.restore(context.place, context.restore_state), claiming(context))
    except BackupDamaged as error:
        if context.damaged not in error.message:
            raise DamageNotFound(f"restore does not name {context.damaged}, but says: {error.message}") from None
        landing = context.target
        if first_key(landing.cluster, landing.api_version, landing.claims) is not None:
            raise DamageNotFound(f"restore refuses {context.damaged}, but the target holds rows") from None
        context.compared.append(Compared("restore of the damaged copy", f"refused: {error.message}", 0, 0))
        return
    raise DamageNotFound(f"restore takes in {context.damaged}, of which a byte was changed")


def _choose(context: DrillContext) -> tuple[FileEntry, int]:
    """A file and a position in it."""
    files = [] if context.backup is None else [file for file in context.backup.files if file.size]
    if not files:
        raise UsageError("the backup has no file to damage", hint="Rehearse with a backup that holds rows.")
    chance = random.Random(context.options.seed)  # noqa: S311 - to be had again by its seed
    victim = chance.choice(sorted(files, key=lambda file: file.name))
    return victim, chance.randrange(victim.size)


def _copy(source: ObjectStore, name: str, size: int, home: ObjectStore, place: str, position: int | None) -> None:
    """Copy an object; the byte at ``position`` is turned over."""
    with home.open_writer(f"{place}/{name}") as writer:
        offset = 0
        for chunk in read_chunks(source, name, size):
            data = bytearray(chunk)
            if position is not None and offset <= position < offset + len(data):
                data[position - offset] ^= 0xFF
            writer.write(data)
            offset += len(data)
        writer.close()
