"""Which engine backs up and where its tasks run: decided by rule before the work begins, and said in the result. Pure."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from formats.api_version import ApiVersion
from formats.sst.compression import Compression
from tikv_br.backup.options import BackupOptions
from tikv_br.backupset.files import FileKind
from tikv_br.spark.executor import DRIVER_THREADS, ExecutorKind

CLUSTER_SLOTS = 32
"""What a plan takes a Spark cluster for whose size is not known yet."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A choice, and why."""

    name: Literal["scan", "store"]
    """``scan``: tasks read rows and write the files. ``store``: tasks have the stores write them."""
    reason: str
    executor: ExecutorKind
    slots: int
    """How many tasks run at the same time, as far as it can be told before the executor has started."""
    rewrites: bool = False
    """Whether tasks make the files of those that the stores write in their own encoding."""

    @property
    def steers(self) -> bool:
        """Whether tasks only steer stores, and no row passes through them."""
        return self.name == "store" and not self.rewrites

    def share_of(self, rate_limit: int, tasks: int) -> int:
        """What each process may take of a store's limit: tasks on the driver share a process, on Spark each has its own."""
        processes = 1 if self.executor == "driver" else max(min(self.slots, tasks), 1)
        return math.ceil(rate_limit / processes)


def choose_engine(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> Engine:
    """Decide for a conversion that loses no more than it may."""
    name, reason = _choice(options, source, target)
    foreign = _foreign_to_stores(options, source, target) if name == "store" else ""
    if foreign:
        reason += f"; as stores do not write {foreign}, their files are rewritten"
    steers_only = name == "store" and not foreign
    executor = _executor(options, steers_only=steers_only)
    return Engine(name, reason, executor, _slots(options, executor, steers_only=steers_only), bool(foreign))


def _foreign_to_stores(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> str:
    """What of the wanted files stores of API ``source`` do not write themselves; empty where they do."""
    if options.file_kind is FileKind.PARQUET:
        return "Parquet"
    if target not in {source, ApiVersion.V2}:
        return f"API {target.label}"
    return "uncompressed files" if options.compression is Compression.NONE else ""


def _choice(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> tuple[Literal["scan", "store"], str]:
    if options.engine != "auto":
        return options.engine, "asked for"
    if not source.has_ttl:
        return "scan", "rows of API v1 have no timestamp or expiry to keep"
    if source is ApiVersion.V2 and target is ApiVersion.V2:
        return "store", "rows of API v2 keep their timestamps and expiry"
    if options.assume_no_ttl:
        return "scan", "no key is taken to expire"
    if target.has_ttl:
        return "store", f"rows of API {source.label} keep their expiry"
    return "store", f"how many rows of API {source.label} expire is known without asking for each"


def _executor(options: BackupOptions, *, steers_only: bool) -> ExecutorKind:
    """Work that only steers stores needs no JVM."""
    if options.executor != "auto":
        return options.executor
    return "driver" if steers_only else "spark"


def _slots(options: BackupOptions, executor: ExecutorKind, *, steers_only: bool) -> int:
    if options.concurrency is not None:
        return options.concurrency
    if executor == "driver":
        # Threads that compute share one interpreter; those that wait for stores do not get in each other's way.
        return DRIVER_THREADS if steers_only else os.cpu_count() or 1
    if options.spark_master.startswith("local[*"):
        return os.cpu_count() or 1
    threads = re.match(r"local\[(\d+)", options.spark_master)
    if options.spark_master.startswith("local"):
        return int(threads[1]) if threads else 1
    return CLUSTER_SLOTS
