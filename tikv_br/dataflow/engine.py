"""The choice of engine and executor: how rows get into the files, and who does the work."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tikv_br.backupset.files import FileKind
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Interval
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.sst.compression import Compression
from tikv_br.tasks.executor import (
    DRIVER_THREADS,
    MIN_SPARK_BYTES,
    MIN_SPARK_TASKS,
    ExecutorKind,
    choose_and_explain,
)
from tikv_br.tasks.settings import is_local

CLUSTER_SLOTS = 32
"""Assumed number of slots of a Spark cluster, whose size is unknown until it has started."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The chosen engine and executor, with the reason."""

    name: Literal["scan", "store", "changes", "merge", "load"]
    """Origin of the rows: a scan, files of stores, the change feed, a merge of backups, or an input of Spark."""
    reason: str
    executor: ExecutorKind
    executor_reason: str
    slots: int
    """Estimated number of concurrent tasks."""
    rewrites_files: bool = False
    """True if tasks rewrite the stores' files, because stores cannot write the requested form."""

    @property
    def stores_write_final_files(self) -> bool:
        """Return whether tasks only send requests to stores, and no row passes through them."""
        return self.name == "store" and not self.rewrites_files

    @classmethod
    def of_tasks(cls, name: Literal["scan", "changes", "merge"], reason: str, options: BackupOptions) -> Engine:
        """The fixed engine of `--base`, `backup merge` or `export raw`; all rows pass through its tasks."""
        executor, executor_reason = _executor(options)
        return cls(name, reason, executor, executor_reason, _slots(options, executor, only_sends_requests=False))

    def settle_executor(self, options: BackupOptions, plan: Sequence[Interval]) -> Engine:
        """The engine with the executor that fits the plan, unless it was requested or is a Spark cluster."""
        if options.executor != "auto" or self.executor == "spark":
            return self
        size = sum(interval.size for interval in plan)
        if not self.stores_write_final_files:
            reason = f"estimated size {size >> 20:,} MiB; Spark pays off from {MIN_SPARK_BYTES >> 20:,} MiB"
            executor, reason = choose_and_explain(len(plan), size, reason)
            return replace(self, executor=executor, executor_reason=reason)
        if options.rate_limit:  # speed does not matter then
            return replace(self, executor="driver", executor_reason="--ratelimit is exact in one process")
        tasks = "1 task" if len(plan) == 1 else f"{len(plan):,} tasks"
        reason = f"stores do the work of {tasks}; Spark pays off from {MIN_SPARK_TASKS:,}"
        executor, reason = choose_and_explain(len(plan), 0, reason)
        return replace(self, executor=executor, executor_reason=reason)


def choose_engine(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> Engine:
    """Choose engine and executor; the conversion must have been checked before."""
    name, reason = _choice(options, source, target)
    unsupported = _unsupported_by_stores(options, source, target) if name == "store" else ""
    if unsupported:
        reason += f"; stores cannot write {unsupported}, so their files are rewritten"
    only_sends_requests = name == "store" and not unsupported
    executor, executor_reason = _executor(options, only_sends_requests=only_sends_requests)
    slots = _slots(options, executor, only_sends_requests=only_sends_requests)
    return Engine(name, reason, executor, executor_reason, slots, bool(unsupported))


def _unsupported_by_stores(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> str:
    """Return the property of the requested files that stores of API ``source`` cannot write; empty if they can."""
    if options.file_kind is FileKind.PARQUET:
        return "Parquet"
    if target not in {source, ApiVersion.V2}:
        return f"API {target.label}"
    return "uncompressed files" if options.compression is Compression.NONE else ""


def _choice(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> tuple[Literal["scan", "store"], str]:
    if options.key_mode is KeyMode.TXN:
        return "store", "only stores write transactional data"
    if options.engine != "auto":
        return options.engine, "requested with --engine"
    if not source.has_ttl:
        return "scan", "rows of API v1 have no timestamp or expiry to keep"
    if source is ApiVersion.V2 and target is ApiVersion.V2:
        return "store", "rows of API v2 keep their timestamps and expiry"
    if options.assume_no_ttl:
        return "scan", "--assume-no-ttl: no key has a TTL"
    if target.has_ttl:
        return "store", f"rows of API {source.label} keep their expiry"
    return "store", f"stores know the TTLs of API {source.label} without a request per key"


def _executor(options: BackupOptions, *, only_sends_requests: bool = False) -> tuple[ExecutorKind, str]:
    """The executor before there is a plan, and the reason; see `Engine.settle_executor`."""
    if options.executor != "auto":
        return options.executor, "requested with --executor"
    if only_sends_requests or is_local(options.spark_master):
        return "driver", "the plan decides"
    return "spark", "--spark-master is a cluster"


def _slots(options: BackupOptions, executor: ExecutorKind, *, only_sends_requests: bool) -> int:
    if options.concurrency is not None:
        return options.concurrency
    if executor == "driver" and only_sends_requests:
        return DRIVER_THREADS  # they wait for stores; computing threads compete for the interpreter lock
    if options.executor == "driver":
        return os.cpu_count() or 1
    if options.spark_master.startswith("local[*"):
        return os.cpu_count() or 1
    threads = re.match(r"local\[(\d+)", options.spark_master)
    if options.spark_master.startswith("local"):
        return int(threads[1]) if threads else 1
    return CLUSTER_SLOTS
