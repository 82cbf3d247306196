"""The source ``tikv``: reads a live cluster by scans, a partition per group of neighbouring regions, and writes it.

By puts, or by SSTs: then tasks stage sorted runs, and the driver merges them and has the stores ingest the result.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StructType

from tikv_br.backupset.coverage import keyspace_codec
from tikv_br.backupset.files import FileEntry
from tikv_br.bulk_load.runs import RunsOptions, load_runs, remove_runs, write_runs
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.keyspaces import chosen_keyspace
from tikv_br.cluster.ttl import TtlFetcher
from tikv_br.cluster.versions import RAW, WRITES
from tikv_br.dataflow.plan import plan_intervals
from tikv_br.dataflow.read import scan_rows
from tikv_br.datasource.options import CRYPTER_OPTIONS, KEY_OPTIONS, Options, use_this_python, with_hints
from tikv_br.datasource.rows import (
    CHANGES,
    FilterPushdown,
    check_schema,
    intersections,
    spark_batches,
    spark_schema,
    written_rows,
)
from tikv_br.errors import ClusterFollowed, TargetNotEmpty, UsageError
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rows import unexpired
from tikv_br.load.loader import RowSource, load_pairs

if TYPE_CHECKING:
    import pyarrow as pa

CLUSTER_OPTIONS = ("pd", "ca", "cert", "key")
READ_OPTIONS = (*CLUSTER_OPTIONS, *KEY_OPTIONS, "ttl", "partition_bytes", "pushdown")
WRITE_OPTIONS = (
    *(*CLUSTER_OPTIONS, "keyspace", "concurrency", "ingest", "staging", "allow_overwrite", "allow_followers"),
    *CRYPTER_OPTIONS,
)
PARTITION_BYTES = 64 << 20
"""Default size of a partition, by PD's estimates: the regions of one task."""
CONCURRENCY = 4
"""Default number of parallel requests of a task that writes."""


class TikvDataSource(DataSource):
    """A RawKV cluster of any API version. docs/spark.md describes the options."""

    @classmethod
    def name(cls) -> str:
        """Name for ``spark.read.format``; also calls `use_this_python`."""
        use_this_python()
        return "tikv"

    def schema(self) -> StructType:
        """``key`` and ``value``, with the option ``ttl`` also ``expire_ts``; with ``log`` the columns of changes. Raises `UsageError` for a wrong option."""
        with with_hints():
            return CHANGES if _is_stream(self.options) else _reader(self.options).schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads without pushing filters down unless asked to: by default Spark refuses readers that can."""
        with with_hints():
            if _is_stream(self.options):
                raise UsageError("option log is for streams", hint="Use spark.readStream.")
            reader = _reader(self.options)
            check_schema(schema, reader.schema)
            reader.schema = schema
            return reader

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Reads the changes in a log archive. Raises `UsageError` for a wrong option, and before PySpark 4.2."""
        with with_hints():
            if not _is_stream(self.options):
                raise UsageError(
                    "option log is missing: streams read the changes in a log archive",
                    hint="Pass its URL, without pd. `tikv-br log start` writes one.",
                )
            check_schema(schema, CHANGES)
            try:
                from tikv_br.datasource.changes import change_reader
            except ImportError as error:  # of what PySpark 4.2 has added
                raise UsageError(
                    f"streams need PySpark 4.2 or newer: {error}", hint="Upgrade pyspark on the driver and all workers."
                ) from error
            return change_reader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001 - as Spark calls it
        """Raises `UsageError` for a mode, option or column that cannot be, `ClusterError` for a cluster that is away."""
        with with_hints():
            options = Options(self.options, WRITE_OPTIONS)
            if overwrite:
                raise UsageError(
                    'mode("overwrite") is not supported: it would delete keys that other clients write',
                    hint='Use mode("append"): it replaces the values of keys that are there. `tikv-br raw delete-range` empties a range.',
                )
            ingest = options.flag("ingest")
            for name in ("allow_overwrite", "allow_followers", "staging", *CRYPTER_OPTIONS):
                if options.text(name) and not ingest:
                    raise UsageError(f"option {name} needs option ingest", hint="Set ingest to true, or leave it out.")
            if ingest and options.text("concurrency"):
                raise UsageError("option concurrency is for puts", hint="Leave it out.")
            staging = options.storage("staging") if ingest else None
            _check_columns(schema)
            config = options.cluster()
            with Cluster.connect(config) as cluster:
                cluster.require(WRITES)
                codec = _codec(cluster, options.text("keyspace"))
                now, limits = cluster.clock.now(), cluster.row_limits(codec)
            if {"ttl", "expire_ts"} & set(schema.names) and not codec.api_version.has_ttl:
                raise UsageError(
                    "the cluster does not support TTLs (API V1 without storage.enable-ttl)",
                    hint="Drop the columns ttl and expire_ts.",
                )
            if staging is not None:
                allowed = {name: options.flag(name) for name in ("allow_overwrite", "allow_followers")}
                folder = staging.child(f"ingest-{secrets.token_hex(8)}")
                return IngestWriter(RunsOptions(config, codec, folder, limits=limits, **allowed), now)
            return TikvWriter(config, codec, options.number("concurrency", CONCURRENCY))


def _is_stream(given: Mapping[str, str]) -> bool:
    """Return whether the options are those of a change stream; Spark requests its columns in the same way as a query's."""
    return any(name.lower() == "log" for name in given)


def _reader(given: Mapping[str, str]) -> TikvReader:
    options = Options(given, READ_OPTIONS)
    cls = ClusterPushdownReader if options.flag("pushdown") else TikvReader
    return cls(
        config=options.cluster(),
        keyspace=options.text("keyspace"),
        ranges=options.keys(),
        with_ttl=options.flag("ttl"),
        partition_bytes=options.number("partition_bytes", PARTITION_BYTES),
    )


def _codec(cluster: Cluster, keyspace: str) -> KeyCodec:
    """The codec of a keyspace by id or name. Raises `UsageError` if there is no such keyspace."""
    hint = "Pass the id or name of a keyspace of the cluster."
    return keyspace_codec(cluster.api_version, chosen_keyspace(cluster, keyspace), "option keyspace", hint)


@dataclass(frozen=True)
class RangesPartition(InputPartition):
    """RPC ranges, ascending, that lie in neighbouring regions."""

    codec: KeyCodec
    ranges: tuple[KeyRange, ...]


@dataclass
class TikvReader(DataSourceReader):
    """Reads the rows of ranges of user keys. Picklable."""

    config: ClusterConfig
    keyspace: str
    ranges: tuple[KeyRange, ...]
    with_ttl: bool
    partition_bytes: int
    schema: StructType = field(init=False)

    def __post_init__(self) -> None:
        self.schema = spark_schema("expire_ts") if self.with_ttl else spark_schema()

    def partitions(self) -> list[InputPartition]:
        """The ranges, cut at bounds of regions into parts of about `partition_bytes`. Asks PD; for the driver."""
        if not self.ranges:
            return []
        with with_hints(), Cluster.connect(self.config) as cluster:
            cluster.require(RAW)
            codec = _codec(cluster, self.keyspace)
            if self.with_ttl and not codec.api_version.has_ttl:
                raise UsageError(
                    "option ttl: this cluster does not support TTLs (API V1 without storage.enable-ttl)",
                    hint="Leave it out: no key of this cluster expires.",
                )
            whole = codec.rpc_range(KeyRange(self.ranges[0].start, self.ranges[-1].end))
            regions = cluster.pd_http.regions(codec.bound(whole.start), codec.bound(whole.end))
            intervals = plan_intervals(regions, codec, whole, self.partition_bytes)
        wanted = [codec.rpc_range(each) for each in self.ranges]
        parts = (intersections([each.span], wanted) for each in intervals)
        return [RangesPartition(codec, part) for part in parts if part]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition page by page, wherever its regions are.

        Spark passes another partition if there is none.
        """
        if not isinstance(partition, RangesPartition):
            return
        codec = partition.codec
        with with_hints(), Cluster.connect(self.config) as cluster:
            raw = cluster.raw_of(codec)
            ttls = TtlFetcher(cluster, raw) if self.with_ttl else None
            for span in partition.ranges:
                for rows in scan_rows(raw, span, ttls):
                    yield from spark_batches(rows, self.schema)


class ClusterPushdownReader(FilterPushdown, TikvReader):
    """Reads only keys for which Spark's filters hold."""


def _check_columns(schema: StructType) -> None:
    """Raise `UsageError` unless a DataFrame has the columns that can be written."""
    wanted: dict[str, tuple[type[DataType], ...]] = {
        "key": (BinaryType,),
        "value": (BinaryType,),
        "ttl": (IntegerType, LongType),
        "expire_ts": (LongType,),
    }
    hint = "Columns: key binary, value binary, and if rows expire ttl (seconds from now) or expire_ts (seconds since the epoch)."
    for column in schema:
        if column.name not in wanted:
            raise UsageError(f"cannot write column {column.name!r}", hint=hint)
        if not isinstance(column.dataType, wanted[column.name]):
            raise UsageError(f"column {column.name} is {column.dataType.simpleString()}", hint=hint)
    for name in ("key", "value"):
        if name not in schema.names:
            raise UsageError(f"column {name} is missing", hint=hint)


@dataclass
class Written(WriterCommitMessage):
    """Numbers of rows that a task has put, and omitted because they had expired."""

    rows: int
    expired: int


@dataclass
class TikvWriter(DataSourceArrowWriter):
    """Puts rows, batch by batch. A task that is run again puts its rows again. Picklable."""

    config: ClusterConfig
    codec: KeyCodec
    concurrency: int

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Put the rows of one partition. Raises `UsageError` for nulls or negative TTLs, `ClusterError`."""
        with with_hints(), Cluster.connect(self.config) as cluster:
            now = cluster.clock.now
            raw = cluster.raw_of(self.codec)
            done = load_pairs(raw.column_writer(), RowSource(written_rows(iterator, now)), concurrency=self.concurrency)
        return Written(done.total_kvs, done.expired_kvs)


@dataclass
class Staged(WriterCommitMessage):
    """Files that a task has staged."""

    runs: tuple[FileEntry, ...] = field(repr=False)


@dataclass
class IngestWriter(DataSourceArrowWriter):
    """Writer of a bulk load.

    Nothing is written to the cluster before `commit`; a repeated task stages its rows again. Picklable.
    """

    options: RunsOptions
    now: int
    """PD's time when the write began: tasks need not reach PD, and their machines' clocks may differ."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one partition. Raises `UsageError` for nulls, negative TTLs, empty and repeated keys, `StorageError`."""
        with with_hints():
            rows = written_rows(iterator, lambda: self.now)
            return Staged(write_runs(self.options, (unexpired(each, self.now) for each in rows)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Ingest the rows of all tasks, in a process of the driver's. Raises `TikvBrError`; the target is unchanged if it is not empty."""
        with with_hints():
            try:
                load_runs(self.options, [run for each in messages if isinstance(each, Staged) for run in each.runs])
            except TargetNotEmpty as error:
                error.hint = "Empty the range, or set allow_overwrite to true."
                raise
            except ClusterFollowed as error:
                error.hint = "Write by puts (without ingest), or set allow_followers to true."
                raise

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - as Spark calls it
        with with_hints():
            remove_runs(self.options)
