"""Removes what a drill's backup has left that did not come to its end; a finished one is a backup as any other, and stays."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.backup.abort import abort_backup
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.ledger import Creation
from tikv_br.errors import BackupPathInUse, DrillRemains, LeaseHeld
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


@dataclass(frozen=True, slots=True)
class UnfinishedBackup:
    """Backups of drills, in the folder of backups."""

    backups: StorageLocation
    cluster: ClusterConfig | None
    """Its safe point is released there; None = it runs out by itself."""

    def location(self, drill: str) -> StorageLocation:
        """Where a drill makes its backup."""
        return self.backups.child(f"drill-{drill}")

    def remove(self, creation: Creation, drill: str) -> None:
        """Remove what lies there, unless it is complete. Raises `DrillRemains` for another place, `LeaseHeld`."""
        place = self.location(drill)
        if creation.place != place.redacted():
            raise DrillRemains(f"an unfinished backup at {creation.place} lies not in {self.backups}")
        try:
            abort_backup(place, self.cluster)
        except LeaseHeld:
            raise
        except BackupPathInUse:
            return
        open_store(place).sweep(deep=True)  # the folder itself was made by the drill
