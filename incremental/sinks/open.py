"""From the address of a sink to the sink."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from formats.api_version import ApiVersion
from formats.errors import UnsupportedFormat
from incremental.sinks.base import Sink
from incremental.sinks.blackhole import BlackholeSink
from incremental.sinks.json_lines import FileSink, StreamSink
from incremental.sinks.telling import TellingSink
from incremental.sinks.tikv import CONCURRENCY, TikvSink
from incremental.sinks.url import BlackholeTarget, FileTarget, StdoutTarget, Target, TikvTarget
from tikv_br.cluster.batches import BATCH_ITEMS
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import REQUEST_TIMEOUT, ClusterConfig
from tikv_br.cluster.tls import TlsFiles
from tikv_br.errors import UsageError

RETRY_SECONDS = 10.0
"""How long one write goes on by itself, and waits for busy stores, before its trouble is told; then it comes again."""


def unfenced() -> None:
    """Let every write pass."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the changes come from: what a sink must not be."""

    cluster_id: int
    keyspace_id: int


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How to write."""

    tls: TlsFiles = field(default_factory=TlsFiles)
    """For a cluster."""
    drop_ttls: bool = False
    """Whether rows that expire may be kept for ever where no TTL can be kept."""
    concurrency: int = CONCURRENCY
    batch_rows: int = BATCH_ITEMS
    """Rows of one request to a cluster, at most."""
    request_timeout: float = REQUEST_TIMEOUT
    """Seconds that one request to a cluster may take."""
    fence: Callable[[], object] = unfenced
    """Called right before each request that writes to a cluster; raises when we may write no more."""
    told: Callable[[Iterable[bytes]], None] | None = None
    """Is told the user keys of each batch before it is written."""


@contextmanager
def open_sink(target: Target, origin: Origin, options: SinkOptions | None = None) -> Iterator[Sink]:
    """The sink, until the end of the block.

    Raises `UsageError` where changes would go back to where they come from, `ApiVersionMismatch`, `ClusterError`,
    `StorageError`.
    """
    options = options or SinkOptions()
    with ExitStack() as stack:
        sink: Sink
        match target:
            case TikvTarget():
                config = ClusterConfig(
                    pd=target.pd,
                    tls=options.tls,
                    request_timeout=options.request_timeout,
                    retry_budget=RETRY_SECONDS,
                    busy_budget=RETRY_SECONDS,
                )
                sink = _tikv(stack.enter_context(Cluster.connect(config)), target, origin, options)
            case FileTarget():
                sink = FileSink(target.path)
            case StdoutTarget():
                sink = StreamSink(sys.stdout.buffer)
            case BlackholeTarget():
                sink = BlackholeSink()
        stack.callback(sink.close)
        yield sink if options.told is None else TellingSink(sink, options.told)


def _tikv(cluster: Cluster, target: TikvTarget, origin: Origin, options: SinkOptions) -> Sink:
    version = cluster.api_version
    target.check(version)
    default = origin.keyspace_id if version is ApiVersion.V2 else 0
    keyspace_id = cluster.pd.keyspace_id(target.keyspace) if target.keyspace else default
    if (cluster.cluster_id, keyspace_id) == (origin.cluster_id, origin.keyspace_id) and not target.below:
        raise UsageError(
            "--sink is the very keyspace that the changes come from",
            hint="Correct --pd or --sink; ?keyspace= behind its address names another keyspace of that cluster.",
        )
    try:
        raw = cluster.raw(keyspace_id, options.fence, target.below)
    except UnsupportedFormat as error:
        raise UsageError(f"--sink: {error}") from None
    return TikvSink(raw, drop_ttls=options.drop_ttls, concurrency=options.concurrency, batch_rows=options.batch_rows)
