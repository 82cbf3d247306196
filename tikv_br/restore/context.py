"""What the steps of a restore find out for one another."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from formats.checksum import Checksum
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.lease import PathLease
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.download_limit import DownloadLimit
from tikv_br.cluster.import_mode import ImportMode
from tikv_br.cluster.regions import Region
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.errors import LeaseLost, StorageError
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.inspect import Inspected
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.plan import Brought, FilePart, RestorePlan, Wanted
from tikv_br.restore.record import Begun, RestoreRecord


@dataclass
class RestoreContext:
    """Filled from step to step."""

    options: RestoreOptions
    reporter: Reporter = silent
    cluster: Cluster = field(init=False)
    info: ClusterInfo = field(init=False)
    backup: BackupSet = field(init=False)
    wanted: list[Wanted] = field(default_factory=list)
    """Ranges of the backup to restore, and under which prefix."""
    import_mode: ImportMode | None = None
    """While it is on."""
    download_limit: DownloadLimit | None = None
    """While one holds."""
    parts: list[FilePart] = field(default_factory=list)
    """All that is wanted of the files."""
    lease: PathLease | None = None
    """While no other restore of this backup into this cluster can be at work."""
    record: RestoreRecord | None = None
    """Where it is written down what is done; None = nowhere."""
    begun: Begun | None = None
    """What an unfinished restore, or this one, has found and decided before its first change."""
    resumed: list[KeyRange] = field(default_factory=list)
    """Spans of the backup's files that an unfinished restore has brought in."""
    todo: list[FilePart] = field(default_factory=list)
    """`parts` without what is `resumed`."""
    plan: RestorePlan | None = None
    """What would be done; of a dry run only."""
    facts: dict[str, Inspected] = field(default_factory=dict)
    restamp_ts: int = 0
    """The timestamp that all rows get; 0 = they keep their own."""
    regions_made: list[Region] = field(default_factory=list)
    session_seconds: float = 0.0
    """How long Spark took to start."""
    brought: Brought = field(default_factory=Brought)
    """By all tasks of this run."""
    found: Checksum | None = None
    """What the cluster answered; None when it was not asked."""

    @property
    def via(self) -> Via:
        """How files get to the stores: Parquet, which stores cannot read, by `Via.UPLOAD` unless that was ruled out."""
        options = self.options
        return Via.UPLOAD if options.via is Via.AUTO and self.backup.file_kind is not FileKind.SST else options.via

    @property
    def resumed_files(self) -> int:
        """Files that an unfinished restore has brought in wholly."""
        return len(self.parts) - len({part.file.name for part in self.todo})

    def still_alone(self) -> bool:
        """Whether no other restore has taken over, by asking the storage; one that does not answer leaves it at what was known."""
        if self.lease is None:
            return True
        with contextlib.suppress(LeaseLost, StorageError):
            self.lease.confirm()
        return self.lease.lost is None

    def took(self, brought: Brought) -> None:
        """Add what a task has done. Raises `LeaseLost` when another restore has taken over."""
        self.brought = Brought(*map(sum, zip(self.brought, brought, strict=True)))
        if self.lease is not None:
            self.lease.check()
