"""Options of a backup, and which API version can be converted to which. No I/O."""

from __future__ import annotations

import enum
from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from tikv_br.backupset.files import FileKind
from tikv_br.cluster.config import ClusterConfig
from tikv_br.errors import ConversionUnsupported, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.sst.compression import Compression
from tikv_br.resume_options import MayChange, compared_as
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorOptions

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2


class Loss(enum.StrEnum):
    """Information that a conversion can lose; the values are the words of ``--allow-loss``."""

    TTL = "ttl"
    TS = "ts"
    KEYSPACE = "keyspace"

    @property
    def meaning(self) -> str:
        """Description for messages."""
        return _MEANINGS[self]


_MEANINGS = {
    Loss.TTL: "the expiry of keys, which would never expire",
    Loss.TS: "the timestamps of keys",
    Loss.KEYSPACE: "the keyspace of keys",
}
_LOSES = {
    (V1TTL, V1): (Loss.TTL,),
    (V2, V1): (Loss.TTL, Loss.TS, Loss.KEYSPACE),
    (V2, V1TTL): (Loss.TS, Loss.KEYSPACE),
}


def require_conversion(source: ApiVersion, target: ApiVersion, allowed: Collection[Loss] = ()) -> None:
    """Raise `ConversionUnsupported` if a conversion from ``source`` to ``target`` has a loss that is not ``allowed``."""
    lost = _LOSES.get((source, target), ())
    if missing := [loss for loss in lost if loss not in allowed]:
        also = "also " if len(missing) < len(lost) else ""
        raise ConversionUnsupported(
            f"a backup of API {source.label} as API {target.label} {also}loses "
            + ", ".join(f"{loss.meaning} ({loss.value})" for loss in missing),
            hint=f"Choose a --dst-api-version that keeps all data, or accept the loss with --allow-loss {','.join(lost)}.",
        )


DEFAULT_FILE_BYTES = 96 << 20
EngineKind: TypeAlias = Literal["auto", "store", "scan"]


class BackupOptions(ExecutorOptions, frozen=True):
    """Options of one backup. Keys are user keys; an empty end means unbounded. Times are in seconds."""

    cluster: Annotated[ClusterConfig, compared_as("cluster_id")]
    storage: MayChange[StorageLocation]
    dst_api_version: Annotated[ApiVersion | None, compared_as("dst_api_version")] = None
    """API version of the backup's files; None = the cluster's own."""
    ranges: Annotated[tuple[KeyRange, ...], compared_as("source_ranges")] = ()
    """Ranges of keys, which must not overlap. Empty = all keys."""
    keyspaces: Annotated[tuple[str, ...], compared_as("source_ranges")] = ()
    """Ids, names, or ``all`` (every keyspace with data); API V2 only. Empty = keyspace 0. All ``ranges`` apply to each."""
    compression: Annotated[Compression, compared_as("compression")] = Compression.ZSTD
    compression_level: int = 0
    """0 = default of the compression."""
    file_kind: Annotated[FileKind, compared_as("file_format")] = FileKind.SST
    allow_loss: Annotated[frozenset[Loss], compared_as("allow_loss")] = frozenset()
    """Losses that the conversion may have."""
    file_bytes: MayChange[int] = DEFAULT_FILE_BYTES
    """Target size of a file that tikv-br writes, in bytes of keys and values before encoding and compression: the page that
    reaches it is the last of the file. Stores write one file per region and ignore it."""
    safe_interval: MayChange[float] = 60.0
    """Seconds by which backup-ts is behind PD's clock."""
    gc_ttl: MayChange[int] = 300
    """Seconds for which the service safe point at backup-ts stays registered after the backup."""
    checksum: Annotated[bool, compared_as("checksum")] = False
    """Compare each interval with the cluster's own checksum afterwards."""
    assume_no_ttl: Annotated[bool, compared_as("assume_no_ttl")] = False
    """Assume that no key has a TTL, which saves one request per key."""
    rate_limit: MayChange[int] = 0
    """Maximum read or write rate per store, in bytes per second; 0 = unlimited."""
    send_credentials: MayChange[bool] = True
    """Send this process's storage credentials to the stores; otherwise they use their own."""
    engine: Annotated[EngineKind, compared_as("engine")] = "auto"
    lock_wait: MayChange[float] = 0.0
    """Seconds to wait for the lock of the path if another run holds it."""
    no_resume: MayChange[bool] = False
    """Remove an unfinished run at the path instead of resuming it."""
    dry_run: MayChange[bool] = False
    allow_empty: MayChange[bool] = False
    """Accept explicit ranges or keyspaces without rows."""
    key_mode: Annotated[KeyMode, compared_as("key_mode")] = KeyMode.RAW
    lock_patience: MayChange[float] = 60.0
    """Seconds to wait for transactions whose locks are in the way."""

    def check(self) -> None:
        """Raise `UsageError` for options that are invalid for every cluster."""
        self._check_ranges()
        if self.compression_level and self.compression_level not in self.compression.levels:
            raise UsageError(f"--compression-level {self.compression_level} is not a level of {self.compression.label}")
        if self.file_bytes <= 0:
            raise UsageError("--file-size must be positive")
        if self.gc_ttl < 0 or self.safe_interval < 0:
            raise UsageError("--gc-ttl and --safe-interval must not be negative")
        self.check_executor(self.rate_limit)

    def _check_ranges(self) -> None:
        ordered = sorted(self.ranges)
        for span in ordered:
            if span.is_empty:
                raise UsageError(
                    f"--start must be below --end, also in each --range: {show_key(span.start, 'text')} is not below {show_key(span.end, 'text')}",
                    hint=r"In --range a colon of a key is written as \x3a.",
                )
        for span, following in pairwise(ordered):
            if not span.end or span.end > following.start:
                raise UsageError(
                    f"the ranges {_show_range(span)} and {_show_range(following)} overlap",
                    hint="Each key may be in one range only. A prefix is the range of all keys that begin with it.",
                )


def _show_range(span: KeyRange) -> str:
    return f"{show_key(span.start, 'text')}:{show_key(span.end, 'text')}"
