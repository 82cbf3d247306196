"""The plan of a backup: the ranges that it covers, divided into intervals of about equal size.

`choose_engine` decides before that how rows get into the files, and who does the work.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from tikv_br.backupset.coverage import codec_of, describe_ranges, keyspace_codec, keyspaces_in, nothing_matched
from tikv_br.backupset.files import FileKind
from tikv_br.cluster.cluster import Cluster, first_rpc_key
from tikv_br.cluster.keyspaces import chosen_keyspace, keyspace_names, show_keyspace
from tikv_br.cluster.regions import RegionColumns
from tikv_br.cluster.topology import Store
from tikv_br.cluster.txnkv import first_txn_key, has_transactions
from tikv_br.cluster.versions import STORE_BACKUP, supports
from tikv_br.dataflow.options import DEFAULT_FILE_BYTES, BackupOptions
from tikv_br.errors import ConversionUnsupported, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import MAX_KEYSPACE, PREFIX_SIZE, KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.progress_events import Notice, Reporter, silent
from tikv_br.report.facts import counted
from tikv_br.storage.credentials import unreachable_by_stores
from tikv_br.tasks.executor import DRIVER_THREADS, MIN_SPARK_BYTES, MIN_SPARK_TASKS, ExecutorKind, choose_and_explain
from tikv_br.tasks.settings import is_local

MIB = 1 << 20
SMALLEST_TASK = 16 * MIB
LARGEST_TASK = 1024 * MIB
TASKS_PER_SLOT = 4
"""More tasks than slots, so that one slow or retried task does not delay the end."""
REGION_OVERHEAD = 1 * MIB
"""Minimum size that a region counts with: even an empty one costs a request."""


class Interval(NamedTuple):
    """The range of one task."""

    span: KeyRange
    size: int
    """Approximate bytes, each region counted with at least `REGION_OVERHEAD`."""
    regions: int


def task_bytes(total_bytes: int, concurrency: int) -> int:
    """Target size of a task that keeps ``concurrency`` slots busy until the end."""
    return min(max(total_bytes // (concurrency * TASKS_PER_SLOT), SMALLEST_TASK), LARGEST_TASK)


def plan_intervals(regions: RegionColumns, codec: KeyCodec, span: KeyRange, wanted_bytes: int) -> list[Interval]:
    """Cut an RPC range at region starts into intervals of about ``wanted_bytes``.

    ``regions`` must overlap the range. A region larger than ``wanted_bytes`` is not divided. A region start
    that is not an encoded key (PD can be made to split anywhere) is not used as a cut.
    """
    intervals: list[Interval] = []
    opened, size, count = span.start, 0, 0
    for index, region_bytes in enumerate(regions.sizes):
        weight = max(region_bytes, REGION_OVERHEAD)
        if count and size + weight // 2 > wanted_bytes:
            cut = cut_at(regions.start(index), codec)
            if cut > opened and (not span.end or cut < span.end):
                intervals.append(Interval(KeyRange(opened, cut), size, count))
                opened, size, count = cut, 0, 0
        size += weight
        count += 1
    intervals.append(Interval(KeyRange(opened, span.end), size, count))
    return intervals


def plan_by_regions(
    cluster: Cluster, codec: KeyCodec, wanted: Iterable[tuple[KeyRange, Sequence[KeyRange]]], slots: int
) -> list[Interval]:
    """Divide parts of RPC ranges, each given with its range, into tasks of about equal size, by PD's estimates.

    ``slots``: concurrent tasks. PD is asked once for each range that has parts.
    """
    sized: list[tuple[KeyRange, RegionColumns]] = []
    for whole, parts in wanted:
        if parts:
            regions = cluster.pd_http.regions(codec.bound(whole.start), codec.bound(whole.end))
            sized += [(part, regions.overlapping(codec.bound(part.start), codec.bound(part.end))) for part in parts]
    task_size = task_bytes(sum(regions.total_bytes for _, regions in sized), slots)
    return [interval for part, regions in sized for interval in plan_intervals(regions, codec, part, task_size)]


def plan_by_sizes(part: KeyRange, sizes: Sequence[tuple[bytes, int]], wanted: int) -> list[Interval]:
    """Cut a range into intervals of about `wanted` bytes; `sizes`: ascending keys, and the bytes from each to the next."""
    intervals: list[Interval] = []
    start, filled, count = part.start, 0, 0
    for key, size in sizes:
        if part.end and key >= part.end:
            break
        if key > start and count and filled + size // 2 > wanted:
            intervals.append(Interval(KeyRange(start, key), filled, count))
            start, filled, count = key, 0, 0
        if key >= part.start:
            filled += size
            count += 1
    return [*intervals, Interval(KeyRange(start, part.end), filled, count)]


def spread_sizes(parts: Sequence[tuple[bytes, bytes, int]], cuts: Iterable[bytes]) -> list[tuple[bytes, int]]:
    """The cuts, and the bytes from each to the next. The size of a part (first key, last key, bytes) is spread evenly over its cuts."""
    keys = sorted({b"", *cuts})
    sizes = [0] * len(keys)
    for start, last, size in parts:
        first = bisect_right(keys, start) - 1
        end = max(bisect_left(keys, last), first + 1) if last else len(keys)
        for at in range(first, end):
            sizes[at] += size // (end - first)
    return list(zip(keys, sizes, strict=True))


def cut_at(bound: bytes, codec: KeyCodec) -> bytes:
    """The RPC key at a region bound; ``b""`` if the bound is not an encoded key."""
    try:
        return codec.from_bound(bound)
    except DamagedBytes:
        return b""


ALL = "all"
"""Keyword for every keyspace with data."""


def source_ranges(options: BackupOptions, cluster: Cluster, target: ApiVersion) -> tuple[KeyRange, ...]:
    """The RPC ranges to back up, ascending and without overlap, each within one keyspace.

    Raises `UsageError` for keyspaces that do not exist, `ConversionUnsupported` if ``target`` would mix several keyspaces.
    """
    keyspaces = _keyspaces(options, cluster)
    if len(keyspaces) > 1 and target is not ApiVersion.V2:
        raise ConversionUnsupported(
            f"cannot back up as API {target.label}, which has no keyspaces: keyspaces "
            f"{', '.join(map(str, keyspaces))} would be mixed",
            hint="Back them up in separate runs, each to a separate path.",
        )
    codecs = [KeyCodec(cluster.api_version, keyspace, options.key_mode) for keyspace in keyspaces]
    ranges = options.ranges or (EVERY_KEY,)
    return tuple(sorted(codec.rpc_range(each) for codec in codecs for each in ranges))


def require_rows(
    options: BackupOptions, cluster: Cluster, spans: Sequence[KeyRange], reporter: Reporter = silent
) -> None:
    """Raise `NothingMatched` if there is no row to back up, and report ranges that are empty and rows that are left out."""
    mode, ts = options.key_mode, cluster.pd.tso() if options.key_mode is KeyMode.TXN else 0
    seen = set() if options.ranges else _report_left_out(options, cluster, spans, reporter)
    explicit = bool(options.ranges or set(options.keyspaces) - {ALL})
    if options.allow_empty:
        return

    def is_empty(span: KeyRange) -> bool:
        codec = codec_of(cluster.api_version, span, mode)
        if codec.keyspace_id in seen:
            return False
        if mode is KeyMode.TXN:
            return first_txn_key(cluster, span, ts) is None
        if not explicit:  # most often its first region has one
            return cluster.raw(codec.keyspace_id).first_rpc_key(span) is None
        return first_rpc_key(cluster, codec.keyspace_id, span) is None

    empty = [span for span in spans if is_empty(span)]
    if len(empty) == len(spans):
        raise nothing_matched("the cluster", cluster.api_version, spans, mode)
    if empty:
        reporter(Notice(f"the cluster has no row {describe_ranges(cluster.api_version, empty, mode)}"))


NAMED_AT_MOST = 8
"""Keyspaces that a warning names and counts."""
COUNTED_AT_MOST = 1000
"""Rows of a keyspace that are counted for a warning."""


def _report_left_out(
    options: BackupOptions, cluster: Cluster, spans: Sequence[KeyRange], reporter: Reporter
) -> set[int]:
    """Report rows of keyspaces that were not selected, and of the other mode. A warning, unless keyspaces were named: then it is meant.

    Returns keyspaces that have rows, as far as it has looked.
    """
    if cluster.api_version is not ApiVersion.V2:
        return set()
    mode, selected = options.key_mode, set(keyspaces_in(ApiVersion.V2, spans))
    if ALL in options.keyspaces:
        seen = selected if len(selected) > 1 else set()
    else:
        seen = set(islice(keyspaces_with_data(cluster, mode), len(selected) + NAMED_AT_MOST + 1))
    left_out = sorted(seen - selected)
    if left_out:
        shown = left_out[:NAMED_AT_MOST]
        names = keyspace_names(cluster, shown)
        texts = [_rows_of(cluster, each, names, mode) for each in shown]
        more = ", and more" if len(left_out) > NAMED_AT_MOST else ""
        reporter(
            Notice(
                f"keyspaces with rows that this backup leaves out: {', '.join(texts)}{more}; --keyspace selects keyspaces, --keyspace all "
                "every one that has rows",
                warning=not options.keyspaces,
            )
        )
    other = ""
    if mode is KeyMode.RAW and has_transactions(cluster):
        other = "transactional data, as of JuiceFS or SurrealDB, which this backup leaves out: `tikv-br backup txn` backs them up"
    elif mode is KeyMode.TXN and next(keyspaces_with_data(cluster, KeyMode.RAW), None) is not None:
        other = "raw rows, which this backup leaves out: `tikv-br backup raw` backs them up"
    if other:
        reporter(Notice(f"the cluster also has {other}", warning=True))
    return seen


def _rows_of(cluster: Cluster, keyspace_id: int, names: Mapping[int, str], mode: KeyMode) -> str:
    """The keyspace, and how many raw rows it has: PD's figures are of regions, which may have rows of several keyspaces."""
    name = show_keyspace(keyspace_id, names)
    if mode is KeyMode.TXN:
        return name
    raw, rows = cluster.raw(keyspace_id), 0
    for page in raw.scan_pages(raw.codec.rpc_range(), COUNTED_AT_MOST + 1, key_only=True):
        rows += len(page.keys)
        if rows > COUNTED_AT_MOST:
            return f"{name}, more than {counted(COUNTED_AT_MOST, 'row')}"
    return f"{name}, {counted(rows, 'row')}"


def keyspaces_with_data(cluster: Cluster, mode: KeyMode) -> Iterator[int]:
    """The ids of all keyspaces with a live key, registered in PD or not; one request each, and one per region without keys."""
    first = partial(first_txn_key, cluster, ts=cluster.pd.tso()) if mode is KeyMode.TXN else cluster.raw().first_rpc_key
    keys = mode.keys
    start: bytes | None = keys.start + bytes(PREFIX_SIZE - 1)
    while start is not None:
        key = first(KeyRange(start, keys.end))
        if key is None:
            return
        found = int.from_bytes(key[1:PREFIX_SIZE], "big")
        yield found
        start = keys.start + (found + 1).to_bytes(PREFIX_SIZE - 1, "big") if found < MAX_KEYSPACE else None


def _keyspaces(options: BackupOptions, cluster: Cluster) -> list[int]:
    if not options.keyspaces:
        return [0]
    if cluster.api_version is not ApiVersion.V2:
        raise UsageError(f"--keyspace: API {cluster.api_version.label} clusters have no keyspaces")
    found: set[int] = set()
    for name in options.keyspaces:
        if name == ALL:
            found.update(keyspaces_with_data(cluster, options.key_mode))
        else:
            found.add(_keyspace(name, cluster))
    return sorted(found) or [0]


def _keyspace(name: str, cluster: Cluster) -> int:
    """The id, looked up in PD. Raises `UsageError`."""
    return keyspace_codec(ApiVersion.V2, chosen_keyspace(cluster, name), "--keyspace").keyspace_id


CLUSTER_SLOTS = 32
"""Assumed number of slots of a Spark cluster, whose size is unknown until it has started."""


class Engine(Struct, frozen=True):
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
        """The engine with the executor that fits the plan, unless it was requested."""
        if options.executor != "auto":
            return self
        size = sum(interval.size for interval in plan)
        if not self.stores_write_final_files:
            reason = f"estimated size {size >> 20:,} MiB; Spark pays off from {MIN_SPARK_BYTES >> 20:,} MiB"
            executor, reason = choose_and_explain(len(plan), size, reason)
            here = executor == "driver" and options.concurrency is None and not is_local(options.spark_master)
            slots = (os.cpu_count() or 1) if here else self.slots
            return replace(self, executor=executor, executor_reason=reason, slots=slots)
        if options.rate_limit:  # the user has chosen the speed, so Spark would gain nothing
            return replace(self, executor="driver", executor_reason="--ratelimit is exact in one process")
        tasks = "1 task" if len(plan) == 1 else f"{len(plan):,} tasks"
        reason = f"stores do the work of {tasks}; Spark pays off from {MIN_SPARK_TASKS:,}"
        executor, reason = choose_and_explain(len(plan), 0, reason)
        return replace(self, executor=executor, executor_reason=reason)


def choose_engine(
    options: BackupOptions, source: ApiVersion, target: ApiVersion, stores: Sequence[Store] = ()
) -> Engine:
    """Choose engine and executor (ADR 29); the conversion must have been checked before. ``stores``: all stores of the cluster.

    Raises `StorageError` if the credentials of the storage, which stores would be sent, cannot be had.
    """
    unsupported = _unsupported_by_stores(options, source, target)
    name, reason = _choice(options, source, target, stores, unsupported)
    rewrites = name == "store" and bool(unsupported)
    if rewrites:
        reason += f"; stores cannot write {unsupported}, so their files are rewritten"
    only_sends_requests = name == "store" and not rewrites
    executor, executor_reason = _executor(options)
    slots = _slots(options, executor, only_sends_requests=only_sends_requests)
    return Engine(name, reason, executor, executor_reason, slots, rewrites)


def _unsupported_by_stores(options: BackupOptions, source: ApiVersion, target: ApiVersion) -> str:
    """Return the property of the requested files that stores of API ``source`` cannot write; empty if they can."""
    if options.file_kind is FileKind.PARQUET:
        return "Parquet"
    if target not in {source, ApiVersion.V2}:
        return f"API {target.label}"
    return "uncompressed files" if options.compression is Compression.NONE else ""


def _choice(
    options: BackupOptions, source: ApiVersion, target: ApiVersion, stores: Sequence[Store], unsupported: str
) -> tuple[Literal["scan", "store"], str]:
    """Engine and reason: no loss first, then the cheaper one."""
    if options.key_mode is KeyMode.TXN:
        return "store", "only stores write transactional data"
    if options.engine != "auto":
        return options.engine, "requested with --engine"
    if source is ApiVersion.V2 and target is ApiVersion.V2:
        return "store", "rows of API v2 keep their timestamps and expiry"
    if source.has_ttl and not options.assume_no_ttl:
        if target.has_ttl:
            return "store", f"rows of API {source.label} keep their expiry"
        return "store", f"stores know the TTLs of API {source.label} without a request per key"
    same = "rows of API v1 have no timestamp or expiry to keep"
    if source.has_ttl:
        same = "--assume-no-ttl: no key has a TTL"
    if obstacle := _obstacle(options, stores, unsupported):
        return "scan", f"{same}; {obstacle}"
    return "store", f"{same}; stores write to {options.storage.scheme}, and no row passes through this machine"


def _obstacle(options: BackupOptions, stores: Sequence[Store], unsupported: str) -> str:
    """Why stores should not write files that a scan could write as well; empty if nothing is known of."""
    if unsupported:
        return f"stores cannot write {unsupported}"
    if options.file_bytes != DEFAULT_FILE_BYTES:
        return "stores ignore --file-size"
    addresses = [each.address for each in stores]
    if not options.cluster.skip_version_check:
        old = [each.address for each in stores if not supports(each.version, STORE_BACKUP)]
        if old:
            return f"the store at {old[0]} is too old to write files"
    unreachable = unreachable_by_stores(options.storage, addresses, send_credentials=options.send_credentials)
    if not unreachable and options.storage.crypter.encrypts and options.cluster.tls.ca is None:
        return "stores would be sent the encryption key in clear text, without TLS"
    return unreachable


def _executor(options: BackupOptions) -> tuple[ExecutorKind, str]:
    """The executor before there is a plan, and the reason; see `Engine.settle_executor`."""
    if options.executor != "auto":
        return options.executor, "requested with --executor"
    return "driver", "the plan decides"


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
