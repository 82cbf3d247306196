"""``tikv-br gc``: the worker and the status of garbage collection, and what removes a service safe point."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tikv_br import signals
from tikv_br.cli import kinds, shared
from tikv_br.cli.check_cmd import NAGIOS, exit_as_plugin, unknown_in_one_line
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.output import Output, confirmation, human_seconds, picked
from tikv_br.cli.status_flags import ServerFlags
from tikv_br.cli.sync_view import show_address
from tikv_br.cluster.timestamps import physical_ms, show_time
from tikv_br.errors import ClusterError, UsageError
from tikv_br.formats.keys.text import show_key

if TYPE_CHECKING:
    from tikv_br.check.probe import ProbeOutcome
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.gc.metrics import WorkerFigures
    from tikv_br.gc.status import GcReport, ServiceReport
    from tikv_br.gc.watch import WorkerWatch
    from tikv_br.gc.worker import Resolve

log = logging.getLogger(__name__)
COLUMNS = ("service", "belongs to", "safe point", "expires in", "holds GC")
METRICS_FILE = (
    "Also write the figures to this file in Prometheus's text format, for node_exporter's textfile collector."
)
SHORTEST = 1.0
VERSION_SECONDS = 5.0
"""Seconds for which `gc status` asks the stores for the API version."""
SHORTEST_LEASE, LONGEST_LEASE = 2.0, 60.0


class RunFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    etcd: shared.EtcdFlags
    life_time: float = flag("10m", "How long old versions are kept at least.", kind=kinds.TIME)
    interval: float = flag("10m", "Time between two rounds.", kind=kinds.TIME)
    lease: float = flag(
        "10s", "Lease TTL. If the leader dies, another worker takes over after this time.", kind=kinds.TIME
    )
    resolve_locks: bool = flag(
        False,
        "Also collect transactional data: resolve the locks of transactions that have ended before each advance. Allows API V1.",
    )
    metrics_file: str = flag("", METRICS_FILE, metavar="FILE")
    server: ServerFlags
    hooks: shared.FailureHookFlags

    def check(self) -> None:
        """Check the flags before any connection is made. Raises `UsageError`."""
        for name, value in (("--life-time", self.life_time), ("--interval", self.interval)):
            if value < SHORTEST:
                raise UsageError(f"{name} is too short: pass at least {SHORTEST:g}s")
        if not SHORTEST_LEASE <= self.lease <= LONGEST_LEASE:
            raise UsageError(f"--lease {self.lease:g}s is out of range: pass {SHORTEST_LEASE:g}s to {LONGEST_LEASE:g}s")
        self.server.check()


@command("gc run", example="--pd 10.0.0.1:2379 --life-time 24h")
def run(flags: RunFlags) -> None:
    """Advance the GC safe point until stopped. Of several workers one leads; another takes over if it dies."""
    flags.check()
    etcd_config = flags.etcd.etcd_config(flags.cluster)
    config = flags.cluster.config()
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.cluster.etcd import Etcd
    from tikv_br.gc.metrics import WorkerFigures, write_metrics
    from tikv_br.gc.watch import WorkerWatch
    from tikv_br.gc.worker import (
        GcWorker,
        WorkerOptions,
        check_has_versions,
        check_round,
        no_locks,
        resolve_locks,
        worker_name,
    )

    options = WorkerOptions(flags.life_time, flags.interval, round(flags.lease))
    stop, file = threading.Event(), Path(flags.metrics_file) if flags.metrics_file else None
    watch = WorkerWatch(name := worker_name(), options, _state_fields)
    with (
        Cluster.connect(options.hurry(config)) as cluster,
        Etcd.open(etcd_config) as etcd,
        contextlib.ExitStack() as stack,
    ):
        check_has_versions(cluster, with_transactions=flags.resolve_locks)
        if file is not None:  # an unusable one is refused at once; later it is a warning
            write_metrics(file, None, WorkerFigures())
        with (
            _serving(flags.out, watch, flags.server),
            signals.stopping(stop, "Another worker takes over, if one runs.", at_once=True),
        ):
            show = partial(_show_round, flags.out, file, watch)
            check = partial(check_round, cluster, resolves=flags.resolve_locks)
            resolve: Resolve = no_locks
            if flags.resolve_locks:  # its requests need not end before the lease does
                resolve = partial(resolve_locks, stack.enter_context(Cluster.connect(config)))
            GcWorker(etcd, cluster.pd, options, show, name, check, resolve).run(stop)
    flags.out.flush()


@contextlib.contextmanager
def _serving(out: Output, watch: WorkerWatch, flags: ServerFlags) -> Iterator[None]:
    """Serve the status of the worker, if asked to. Raises `UsageError` if the address cannot be used."""
    address = flags.address()
    if address is None:
        yield
        return
    from tikv_br.web.server import listening
    from tikv_br.web.status import StatusApi

    with listening(address, StatusApi(watch, flags.key(), address).answer) as chosen:
        show_address(out, f"http://{chosen}/", flags.key_file())
        yield


def _show_round(
    out: Output, file: Path | None, watch: WorkerWatch, found: GcReport | None, figures: WorkerFigures
) -> None:
    """Show what PD has reported, if it has, and the figures; the worker logs the same for people."""
    watch.show(found, figures)
    if found is not None and out.is_json:
        out.result("gc", _fields(found) | _lock_fields(found))
    if file is not None:
        from tikv_br.gc.metrics import write_metrics

        try:
            write_metrics(file, found, figures)
        except UsageError as error:
            log.warning("%s", error.message)


def _fields(found: GcReport) -> dict[str, object]:
    holder = found.holder
    return {
        **picked(found, "safe_point", "worker_safe_point", "worker_lag", "held_seconds", "held_since_ms"),
        "safe_point_lag": found.lag,
        "holder": "" if holder is None else holder.service,
    }


def _lock_fields(found: GcReport) -> dict[str, object]:
    lock = found.lock
    return {
        "lock_key": "" if lock is None else show_key(lock.key),
        "lock_start_ts": 0 if lock is None else lock.start_ts,
        "lock_age": 0.0 if lock is None else lock.age,
    }


def _service_fields(found: GcReport, each: ServiceReport) -> dict[str, object]:
    return {
        "service": each.service,
        "service_kind": each.owner.kind.value,
        "service_name": each.owner.name,
        "safe_point": each.safe_point,
        "safe_point_lag": each.lag,
        "service_ttl": each.ttl,
        "holds_gc": each == found.holder,
    }


def _state_fields(found: GcReport | None) -> dict[str, object]:
    """The state of GC in ``/status``; nothing is known of it by a worker that does not lead."""
    if found is None:
        return {"gc": None, "services": []}
    return {
        "gc": _fields(found) | _lock_fields(found),
        "services": [_service_fields(found, each) for each in found.services],
    }


class GcStatusFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    nagios: bool = NAGIOS()
    warn: float = flag("24h", "Age of the GC safe point that is a warning.", kind=kinds.TIME)
    critical: float = flag("72h", "Age of the GC safe point that is critical (Nagios).", kind=kinds.TIME)
    metrics_file: str = flag("", METRICS_FILE, metavar="FILE")


@command("gc status", example="--pd 10.0.0.1:2379")
def status(flags: GcStatusFlags) -> None:
    """Show the GC safe point, every service safe point with its owner, and which one holds GC back."""
    with unknown_in_one_line(flags.nagios):
        if flags.critical < flags.warn:
            raise UsageError("--critical must not be shorter than --warn")
        config = flags.cluster.config()
        from tikv_br.gc.status import read_report

        found = read_report(config)
        if flags.metrics_file:
            from tikv_br.gc.metrics import write_metrics

            write_metrics(Path(flags.metrics_file), found, None)
        outcome = _judge(found, flags.warn, flags.critical, lambda: _has_no_versions(config))
        if flags.nagios:
            from tikv_br.check.probe import Result

            exit_as_plugin([Result("gc", outcome, 0)])
    _show(flags.out, found, outcome)


def _has_no_versions(config: ClusterConfig) -> bool:
    """Whether raw keys have no old versions; False also if no store answers."""
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.formats.api_version import ApiVersion

    with contextlib.suppress(ClusterError), Cluster.connect(replace(config, retry_budget=VERSION_SECONDS)) as cluster:
        return cluster.api_version is not ApiVersion.V2
    return False


def _judge(
    found: GcReport, warn_seconds: float, critical_seconds: float, has_no_versions: Callable[[], bool]
) -> ProbeOutcome:
    """Return the state of GC, with the reason and advice if it is behind. `has_no_versions` is asked if GC has never run."""
    from tikv_br.check.probe import Figure, ProbeOutcome, Status
    from tikv_br.gc.status import OwnerKind

    figures = [Figure("services", len(found.services)), Figure("held_back", round(found.held_seconds), "s")]
    unlisted = f"; global and keyspace-level GC barriers cannot be listed: {found.unlisted}" if found.unlisted else ""
    if found.lag is None and has_no_versions():
        seen = "GC has never run, and need not for raw data: of this API version it has no old versions"
        return ProbeOutcome(Status.OK, f"{seen}{unlisted}", "", tuple(figures))
    if found.lag is None:
        advice = "Run `tikv-br gc run`: without a GC worker, old versions and tombstones are kept forever."
        return ProbeOutcome(Status.WARN, f"GC has never run{unlisted}", advice, tuple(figures))
    figures.append(Figure("gc_age", round(found.lag), "s", f"{warn_seconds:g}", f"{critical_seconds:g}"))
    holder, seen = found.holder, f"the GC safe point is {human_seconds(max(found.lag, 0))} old"
    if holder is not None:
        held = human_seconds(found.held_seconds)
        since = f"has held GC back for {held}, since {show_time(found.held_since_ms, age=False)}"
        seen += f"; {holder.service} {since if found.held_seconds else 'holds GC back'}"
    seen += unlisted
    if found.lag <= warn_seconds:
        return ProbeOutcome(Status.OK, seen, "", tuple(figures))
    if holder is not None and holder.owner.kind is OwnerKind.GLOBAL_BARRIER:
        advice = f"If {holder.service} ({holder.owner}) is no longer needed, let the program that has set it remove it."
    elif holder is not None:
        advice = f"If {holder.service} ({holder.owner}) is no longer needed, remove its safe point: `tikv-br gc release {holder.service}`."
    else:
        advice = "No service holds GC back: no GC worker advances it. Run `tikv-br gc run`."
    status = Status.FAIL if found.lag > critical_seconds else Status.WARN
    return ProbeOutcome(status, seen, advice, tuple(figures))


def _show(out: Output, found: GcReport, outcome: ProbeOutcome) -> None:
    judged = {"status": outcome.status.value, "seen": outcome.seen, "advice": outcome.advice}
    advice = f"\n{outcome.advice}" if outcome.advice else ""
    out.result("gc", _fields(found) | judged, f"{outcome.status.value}: {outcome.seen}{advice}")
    for each in found.services:
        out.result("gc_service", _service_fields(found, each))
    worker = ("gc_worker", "GC itself", show_time(physical_ms(found.worker_safe_point)), "never", "")
    rows = [worker, *(_row(each, found.holder) for each in found.services)]
    out.table(COLUMNS, rows, drop=("belongs to", "expires in"))


def _row(each: ServiceReport, holder: ServiceReport | None) -> tuple[str, str, str, str, str]:
    ttl = "never" if each.ttl is None else human_seconds(each.ttl) if each.ttl > 0 else "expired"
    holds = "yes" if each == holder else ""
    return each.service, str(each.owner), show_time(physical_ms(each.safe_point)), ttl, holds


class ReleaseFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    service: str = argument(REQUIRED, "SERVICE-ID", "Name of the service safe point; see `gc status`.")
    watch: float = flag(
        "75s", "How long to watch that no run renews it (0 = do not). Runs renew theirs every 60s.", kind=kinds.TIME
    )
    yes: bool = flag(False, "Do not ask. Required if stdin is not a terminal.", "--yes", "--confirm", command_line=True)


@command("gc release", example="tikv-br-sync-old --pd 10.0.0.1:2379")
def release(flags: ReleaseFlags) -> None:
    """Remove a service safe point that is no longer needed, so that GC can pass it. Refused while a run renews it."""
    config = flags.cluster.config()
    from tikv_br.cluster.pd import PdClient
    from tikv_br.gc.status import find, owner_of, release_unused

    with PdClient(config) as client:
        pd, owner = client, owner_of(flags.service)
        found = find(pd, flags.service)
        lost = "GC may then remove versions that it needs to be resumed or started from."
        confirmation("gc release", yes=flags.yes)(f"Remove {flags.service} ({owner})? {lost}")
        log.info("watching for %s that nobody renews %s", human_seconds(flags.watch), flags.service)
        release_unused(pd, found, flags.watch)
    fields = {"service": flags.service, "service_kind": owner.kind.value, "service_name": owner.name}
    text = f"Removed the service safe point {flags.service} ({owner})."
    flags.out.result("gc_release", fields | {"safe_point": found.safe_point}, text)
