"""Options of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import UsageError
from tikv_br.storage.url import StorageLocation

Format = Literal["parquet", "csv", "jsonl"]
Encoding = Literal["raw", "hex", "escaped"]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of one export."""

    read: BackupOptions
    """Cluster to read, executor, and in ``storage`` the destination; the rest is not used."""
    backup: StorageLocation | None = None
    """A backup to read instead of the cluster: a full one or, with those that it continues, an incremental one."""
    format: Format = "parquet"
    encoding: Encoding | None = None
    """Text form of keys and values; None = as ``raw import`` assumes for such a file."""
    overwrite: bool = False
    """Replace an earlier export at the destination."""

    @property
    def form(self) -> Encoding:
        """Text form of keys and values."""
        return self.encoding or ("raw" if self.format == "csv" else "hex")

    def check(self) -> None:
        """Raise `UsageError` for options that are invalid for every source."""
        self.read.check()
        if self.encoding and self.format == "parquet":
            raise UsageError(
                "--encoding cannot be used with --format parquet, which keeps keys and values as bytes",
                hint="Leave out --encoding, or pass --format csv or jsonl.",
            )
        if self.read.storage.crypter.encrypts:
            raise UsageError("the files of an export cannot be encrypted with --crypter", hint="Use --s3.sse.")
        if self.backup is not None and self.read.assume_no_ttl:
            raise UsageError("--assume-no-ttl cannot be used with --from-backup: a backup has the expiry of its rows")
