"""What a drill's tail may do in a cluster that is not the drill's: write down what it writes, remove only its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from formats.keys import KeyCodec
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange
from tikv_br.drill.journal import Journal
from tikv_br.drill.tail import Lane
from tikv_br.proof.lookup import find_value
from tikv_br.proof.ranges import codec_of
from tikv_br.proof.stored_rows import records
from tikv_br.restore.plan import Wanted, choose_parts

FEW = 100
"""Keys that are looked up one by one; for more, files are read."""


@dataclass(frozen=True, slots=True)
class Stewardship:
    """A `tikv_br.drill.tail.Steward`: the rows there are the backup's, and those that its journal has."""

    backup: BackupSet
    journal: Journal

    def told(self, lane: Lane, keys: Sequence[bytes]) -> None:
        """Write them down. Raises `StorageError`."""
        self.journal.note(map(lane.target.rpc_key, keys))

    def spare(self, lane: Lane, keys: Sequence[bytes]) -> Collection[bytes]:
        """Those that neither the journal nor the backup has. Raises as reading the backup does."""
        unknown = [key for key in keys if not self.journal.has(lane.target.rpc_key(key))]
        return set(unknown) - self._backed_up(unknown, codec_of(self.backup.api_version, lane.span))

    def _backed_up(self, keys: Sequence[bytes], codec: KeyCodec) -> set[bytes]:
        """Those of some user keys, which ascend, that the backup has."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if len(keys) <= FEW:
            return {key for key in keys if find_value(self.backup, key, codec.keyspace_id) is not None}
        span = KeyRange(codec.rpc_key(keys[0]), codec.rpc_key(keys[-1]) + b"\0")
        wanted = pa.array(keys, pa.large_binary())
        found: set[bytes] = set()
        for part in choose_parts(self.backup.files, [Wanted(span)]):
            for batch in records(self.backup.store, part.file, codec, part.span):
                found.update(batch["key"].filter(pc.is_in(batch["key"], value_set=wanted)).to_pylist())
        return found
