"""``tikv-br kafka replay``."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from tikv_br import signals
from tikv_br.cli import kinds, shared
from tikv_br.cli.command import Flags, command, flag
from tikv_br.cli.output import Output, human_bytes
from tikv_br.cli.status_flags import SHORTEST_STATUS
from tikv_br.cli.sync_flags import MAX_BATCH_ROWS, SCRATCH_DIR, SINK_RATE, SORTER_MEMORY, scratch_folder
from tikv_br.cli.sync_view import repeated
from tikv_br.cluster.timestamps import parse_ts, show_ts
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.incremental.kafka.replay import Replay, ReplayOptions, ReplayStatus
    from tikv_br.incremental.kafka.topic_feed import ReplayLimits
    from tikv_br.incremental.kafka.url import KafkaUrl
    from tikv_br.incremental.sinks.url import TikvTarget

log = logging.getLogger(__name__)
RESUMES = "Run the same command to resume: the consumer group has the progress."


class TargetFlags(Flags):
    sink: str = flag("", "Target (required): tikv://PD[,PD][?keyspace=ID&api-version=v2].", metavar="URL")
    keyspace: str = flag(
        "",
        "Keyspace of the target, by id or name (API V2; required if the topic has another one than 0).",
        metavar="ID|NAME",
    )
    sink_ca: str | None = flag(None, "CA certificate of the target (PEM). Enables TLS.", metavar="FILE")
    sink_cert: str | None = flag(None, "Client certificate for the target (PEM).", metavar="FILE")
    sink_key: str | None = flag(None, "Private key of --sink-cert (PEM).", metavar="FILE")
    concurrency: int = flag(
        4, "Maximum number of concurrent requests to the target.", limits=(1, kinds.MAX_CONCURRENCY)
    )
    sink_batch_size: int = flag(
        512, "Maximum rows per request. Requests are also limited to 256 KiB.", limits=(1, MAX_BATCH_ROWS)
    )
    sink_ratelimit: int = SINK_RATE()
    sink_patience: float = flag(
        "10m",
        "How long to retry an unavailable target, including at startup, before the replay fails.",
        kind=kinds.TIME,
    )
    allow_loss: str = flag(
        "",
        "Data that the target may drop: ttl writes rows with a TTL to a V1 target, where they never expire (default: refuse).",
        metavar="ttl",
    )

    def target(self) -> TikvTarget:
        """The target. Raises `UsageError`."""
        if not self.sink:
            raise UsageError("--sink is missing", hint="Pass the cluster to write to: --sink tikv://PD.")
        if self.allow_loss not in {"", "ttl"}:
            raise UsageError(f"--allow-loss {self.allow_loss!r} is not valid: a sink takes ttl only")
        from tikv_br.incremental.sinks.url import TikvTarget, parse

        target = parse(self.sink)
        if not isinstance(target, TikvTarget):
            raise UsageError(f"--sink {target} is not a cluster", hint="Pass --sink tikv://PD.")
        if self.keyspace and target.keyspace not in {"", self.keyspace}:
            raise UsageError(f"--keyspace {self.keyspace} contradicts --sink {target}", hint="Pass one of them.")
        return replace(target, keyspace=self.keyspace or target.keyspace)


class ReplayFlags(shared.CommandFlags):
    source: str = flag(
        "",
        "Topic (required): kafka://HOST:PORT[,HOST:PORT]/TOPIC?protocol=open-protocol; parameters as of a sink of sync.",
        "--from",
        metavar="URL",
    )
    target_flags: TargetFlags
    group: str = flag(
        "", "Consumer group that has the progress; one per target.", metavar="NAME", show_default="tikv-br-TOPIC"
    )
    once: bool = flag(False, "Stop at the end that the topic has at the start.")
    until: str = flag(
        "",
        "Apply changes up to this time only, then stop: a PD timestamp, a time or an age.",
        "--until",
        "--until-ts",
        metavar="TS|TIME",
    )
    kafka_patience: float = flag(
        "10m", "How long Kafka may not answer before the replay fails (at startup: at most 1m).", kind=kinds.TIME
    )
    scratch_dir: str = SCRATCH_DIR()
    sorter_memory: int = SORTER_MEMORY()
    status_every: float = flag(
        "10s", "Interval between status lines on stderr, in --log-file or as JSON.", kind=kinds.TIME
    )


@command(
    "kafka replay", example="--from 'kafka://10.0.2.1:9092/changes?protocol=open-protocol' --sink tikv://10.0.1.1:2379"
)
def replay_topic(flags: ReplayFlags) -> None:
    """Apply the changes in a Kafka topic to a cluster, until stopped. Resumes where the consumer group left off."""
    options = _options(flags)
    from tikv_br.incremental.kafka.replay import replay

    stop, out = threading.Event(), flags.out
    running: list[Replay] = []

    def show() -> None:
        for each in running:
            _show(out, each.status())

    with signals.stopping(stop, RESUMES, lambda: bool(running)) as received, repeated(flags.status_every, show):
        status = replay(options, stop, running.append)
    if status is not None:
        out.result("summary", asdict(status), f"Stopped: {describe(status)}")
    out.flush()
    if received:
        raise received[0]


def _options(flags: ReplayFlags) -> ReplayOptions:
    """Return the options of the replay. Raises `UsageError`."""
    if not flags.source:
        raise UsageError(
            "--from is missing", hint="Pass the topic: --from 'kafka://HOST:PORT/TOPIC?protocol=open-protocol'."
        )
    if flags.status_every < SHORTEST_STATUS:
        raise UsageError(f"--status-every is too short: pass at least {SHORTEST_STATUS:g}s")
    to, scratch = flags.target_flags, scratch_folder(flags.scratch_dir)
    target, source = to.target(), _source(flags.source)
    from tikv_br.cluster.config import ClusterConfig, TlsFiles

    tls = TlsFiles(ca=to.sink_ca, cert=to.sink_cert, key=to.sink_key)
    now = partial(shared.pd_time, ClusterConfig(target.pd, tls))
    until_ts = parse_ts(flags.until, "--until", now) if flags.until else None
    # After the checks of the flags, as these load NumPy.
    from tikv_br.incremental.kafka.replay import ReplayOptions
    from tikv_br.incremental.sinks.open import SinkOptions
    from tikv_br.incremental.sinks.writer import ReplicateOptions

    return ReplayOptions(
        source=source,
        target=target,
        scratch=scratch,
        group=flags.group or f"tikv-br-{source.topic}",
        patience=flags.kafka_patience,
        limits=_limits(flags.source),
        once=flags.once,
        until_ts=until_ts,
        sorter_bytes=flags.sorter_memory,
        sink=SinkOptions(
            tls=tls,
            drop_ttls=bool(to.allow_loss),
            concurrency=to.concurrency,
            batch_rows=to.sink_batch_size,
        ),
        replicate=ReplicateOptions(patience=to.sink_patience, rate_limit=to.sink_ratelimit),
    )


def _source(address: str) -> KafkaUrl:
    """The topic. Raises `UsageError`."""
    from tikv_br.incremental.kafka.url import parse

    try:
        return parse(address)
    except UsageError as error:
        raise UsageError(f"--from: {error.message}", hint=error.hint) from None


def _limits(address: str) -> ReplayLimits:
    """The limits that the address names; their defaults are the writers' defaults."""
    from tikv_br.incremental.kafka.topic_feed import ReplayLimits

    given = {name.replace("_", "-"): value for name, value in parse_qsl(urlsplit(address).query)}
    return ReplayLimits(
        *(int(given[name]) if name in given else None for name in ("max-message-bytes", "max-batch-size"))
    )


def _show(out: Output, status: ReplayStatus) -> None:
    if out.is_json:
        out.result("status", asdict(status))
    else:
        log.info("%s: %s", status.topic, describe(status))


def describe(status: ReplayStatus) -> str:
    """The status as one line."""
    if status.as_it_arrives and status.checkpoint_lag is not None:
        applied = f"applied as it arrives, newest change {show_ts(status.checkpoint_ts, age=False)} ({status.checkpoint_lag:.1f} s old)"
    elif status.checkpoint_lag is None:
        applied = f"nothing applied yet, as {status.unresolved_partitions:,} of {status.partitions:,} partitions have no resolved-ts"
    else:
        applied = f"applied up to {show_ts(status.checkpoint_ts, age=False)} ({status.checkpoint_lag:.1f} s behind)"
    held = status.sorter_memory_bytes + status.sorter_disk_bytes
    parts = [applied, f"{status.written:,} rows written", f"{status.events_per_second:,.0f} events/s"]
    if held:
        parts.append(f"{human_bytes(held)} wait for a later resolved-ts")
    if status.repeats:
        parts.append(f"{status.repeats:,} repeated events ignored")
    if status.kafka_failing_seconds:
        parts.append(f"Kafka has not answered for {status.kafka_failing_seconds:.0f} s: {status.last_error}")
    if status.sink_failing_seconds:
        parts.append(f"the target has accepted no writes for {status.sink_failing_seconds:.0f} s: {status.last_error}")
    return ", ".join(parts)
