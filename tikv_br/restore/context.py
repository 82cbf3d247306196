"""State that the steps of a restore share."""

from __future__ import annotations

from dataclasses import dataclass, field

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.lease import PathLease
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.import_mode import DownloadLimit, ImportMode
from tikv_br.cluster.ingest_announcer import Announcer
from tikv_br.cluster.regions import Region
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.compare.files import BackgroundComparison, FilePart
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Reporter, silent
from tikv_br.restore.inspect import BackgroundInspection, FileFacts
from tikv_br.restore.options import RestoreOptions, Via
from tikv_br.restore.plan import IngestResult, RestorePlan, RestoreRange
from tikv_br.restore.record import RestoreCheckpoint, RestoreRecord


@dataclass(repr=False, eq=False)
class RestoreContext:
    """State that the steps share. The comment behind a field names the step that sets it."""

    options: RestoreOptions
    reporter: Reporter = silent
    clusters: ClusterPool = field(default_factory=ClusterPool)
    cluster: Cluster = field(init=False)  # connect
    info: ClusterInfo = field(init=False)  # connect
    backup: BackupSet = field(init=False)  # read the backup
    wanted: list[RestoreRange] = field(default_factory=list)  # plan
    """Ranges of the backup to restore, with the rewrite of their keys."""
    keyspaces: dict[KeyCodec, KeyCodec] = field(default_factory=dict)  # plan
    """The keyspaces of the target, and those of the backup that are restored into them."""
    names: dict[int, str] = field(default_factory=dict)  # plan
    """Names of the target's keyspaces, as far as they are known."""
    import_mode: ImportMode | None = None  # enter import mode; until leave import mode
    download_limit: DownloadLimit | None = None  # set the download limit; until lift the download limit
    parts: list[FilePart] = field(default_factory=list)  # plan
    """The wanted parts of all files."""
    lease: PathLease | None = None  # acquire the restore lock; until release the restore lock
    """Lease that excludes other restores of this backup into this cluster."""
    record: RestoreRecord | None = None  # acquire the restore lock, look for a resumable restore
    """Record of the progress; None = the restore cannot be resumed."""
    checkpoint: RestoreCheckpoint | None = None  # look for a resumable restore; save the restore checkpoint
    resumed: list[KeyRange] = field(default_factory=list)  # look for a resumable restore
    """Key ranges of the backup's files that an unfinished restore has restored."""
    todo: list[FilePart] = field(default_factory=list)  # look for a resumable restore, check the target
    """`parts` without the `resumed` ranges."""
    plan: RestorePlan | None = None  # plan the changes, of a dry run
    inspection: BackgroundInspection | None = None  # check the target
    facts: dict[str, FileFacts] = field(default_factory=dict)  # check every file
    restamp_reason: str = ""  # check timestamps
    """Reason why ingested rows get a new timestamp; empty = they keep their own."""
    restamp_ts: int = 0  # look for a resumable restore, check timestamps, announce the ingest, compare checksums
    """New timestamp of ingested rows; 0 = they keep their own."""
    announcer: Announcer | None = None  # announce the ingest
    already_restored: bool = False  # check the target
    """True if the target already held the whole backup."""
    regions_made: list[Region] = field(default_factory=list)  # split and scatter
    session_seconds: float = 0.0  # ingest, put
    done: IngestResult = field(default_factory=IngestResult)  # ingest, put
    """Sum over all tasks of this run."""
    comparing: BackgroundComparison | None = None  # ingest, put; until compare checksums
    """Background comparison of restored parts, while others are restored."""
    overlap_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds, by step, for which its work was done while an earlier step ran."""
    found: Checksum | None = None  # compare checksums, check the target
    """The cluster's checksum of the backup's keys; None if it was not compared."""
    others: dict[tuple[str, KeyRange], int] = field(default_factory=dict)  # compare checksums
    """Foreign rows of the target with ``--allow-overwrite``, by part, and by gap without a file."""

    @property
    def via(self) -> Via:
        """Transfer of files to stores. `Via.AUTO` becomes `Via.UPLOAD` for Parquet, which stores cannot read."""
        options = self.options
        return Via.UPLOAD if options.via is Via.AUTO and self.backup.file_kind is not FileKind.SST else options.via

    @property
    def codec(self) -> KeyCodec:
        """Converts keys of the target, in any keyspace, except from and to user keys."""
        return KeyCodec(self.info.api_version, mode=self.backup.key_mode)

    @property
    def file_count(self) -> int:
        """Number of files of all `parts`."""
        return sum(len(part.files) for part in self.parts)

    @property
    def resumed_files(self) -> int:
        """Number of files that an unfinished restore has completely restored."""
        return self.file_count - len({file.name for part in self.todo for file in part.files})

    def close(self) -> None:
        """End all background work; idempotent."""
        for work in (self.inspection, self.comparing):
            if work is not None:
                work.stop()
        if self.announcer is not None:
            self.announcer.close()

    def add_result(self, part: FilePart, result: IngestResult) -> None:
        """Add a task's result and start to compare its part. Raises `LeaseLost` if another restore has taken over."""
        self.done = IngestResult(*map(sum, zip(self.done, result, strict=True)))
        if self.comparing is not None:
            self.comparing.add(part)
        if self.lease is not None:
            self.lease.check()
