"""Which engine backs up and where its tasks run: decided by rule before the work begins, and said in the result. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from formats.api_version import ApiVersion
from formats.sst.compression import Compression
from tikv_br.backup.options import BackupOptions
from tikv_br.errors import ConversionUnsupported, UsageError
from tikv_br.spark.executor import DRIVER_THREADS, ExecutorKind

CLUSTER_SLOTS = 32
"""What a plan takes a Spark cluster for whose size is not known yet."""
USE_SCAN = "--engine scan can do it: it reads the rows and writes the files from here."


@dataclass(frozen=True, slots=True)
class Engine:
    """A choice, and why."""

    name: Literal["scan", "store"]
    """``scan``: tasks read rows and write the files. ``store``: tasks have the stores write them."""
    reason: str
    executor: ExecutorKind
    slots: int
    """How many tasks run at the same time, as far as it can be told before the executor has started."""


def choose_engine(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> Engine:
    """Decide for a conversion that keeps all data.

    Raises `ConversionUnsupported`, `UsageError` for what the chosen engine cannot write.
    """
    name, reason = _choice(options, source)
    if name == "store":
        _check_stores_can(options, source, target)
    executor = _executor(options, name)
    return Engine(name, reason, executor, _slots(options, name, executor))


def _choice(options: BackupOptions, source: ApiVersion) -> tuple[Literal["scan", "store"], str]:
    if options.engine != "auto":
        return options.engine, "asked for"
    if options.compression is Compression.NONE:
        return "scan", "stores compress whatever they write"
    if source is ApiVersion.V2:
        return "store", "rows of API v2 keep their timestamps and expiry"
    if not source.has_ttl:
        return "scan", "rows of API v1 have no timestamp or expiry to keep"
    if options.assume_no_ttl:
        return "scan", "no key is taken to expire"
    return "store", "rows of API v1ttl keep their expiry"


def _check_stores_can(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> None:
    if target is not source and target is not ApiVersion.V2:
        raise ConversionUnsupported(
            f"stores of API {source.label} do not write files of API {target.label}", hint=USE_SCAN
        )
    if options.compression is Compression.NONE:
        raise UsageError("--compression none: stores compress whatever they write", hint=USE_SCAN)


def _executor(options: BackupOptions, name: str) -> ExecutorKind:
    """Work that only steers stores needs no JVM."""
    if options.executor != "auto":
        return options.executor
    return "driver" if name == "store" else "spark"


def _slots(options: BackupOptions, name: str, executor: ExecutorKind) -> int:
    if options.concurrency is not None:
        return options.concurrency
    if executor == "driver":
        # Threads that compute share one interpreter; those that wait for stores do not get in each other's way.
        return DRIVER_THREADS if name == "store" else os.cpu_count() or 1
    if options.spark_master.startswith("local[*"):
        return os.cpu_count() or 1
    threads = re.match(r"local\[(\d+)", options.spark_master)
    if options.spark_master.startswith("local"):
        return int(threads[1]) if threads else 1
    return CLUSTER_SLOTS
