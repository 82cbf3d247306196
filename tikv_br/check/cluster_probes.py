"""Probes of a cluster: PD, stores, API version, clock, space, and what its version supports."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tikv_br.backupset import layout
from tikv_br.check.probe import Figure, Probe, ProbeContext, ProbeOutcome, fail, listed, ok, skipped, warn
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.clock import ClockDifference, measure_clock
from tikv_br.cluster.pd_http import GcStatus, StoreStatus, gc_status, member_health, merges_regions, store_statuses
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.cluster.topology import read_config, store_config
from tikv_br.cluster.versions import API_V2, CAPABILITIES, NEWEST_TRIED, OF_V2, RAW, TXN_REWRITE, Version, supports
from tikv_br.errors import ClusterError, ClusterUnreachable
from tikv_br.formats.api_version import ApiVersion

CLOCK_WARN, CLOCK_FAIL = 1.0, 5.0
"""Seconds between this clock and PD's; locks on a storage allow for 10 between two machines."""
SPACE_WARN, SPACE_FAIL = 20.0, 10.0
"""Per cent of a store's disk that is left; below 20 PD moves no more regions to it (low-space-ratio)."""
_LEAVING = "Offline"
"""State of a store being removed: it serves until its data has moved."""
CONFIG_SECONDS = 2.0
"""Seconds that the probe of versions waits for a store's API version."""
GC_WARN_HOURS = 24.0
"""Age in hours from which on a service safe point causes a warning."""


def probe_pd(context: ProbeContext) -> ProbeOutcome:
    """PD answers, has a leader, and all members are well."""
    cluster = context.connection
    leader = cluster.pd.connection.leader.address
    health = member_health(cluster.pd_http)
    sick = [name for name, well in health.items() if not well]
    seen = f"leader {leader}, {len(health)} {'member' if len(health) == 1 else 'members'}, cluster {cluster.cluster_id}"
    if sick:
        return warn(f"{seen}; unhealthy: {listed(sick)}", "Restore these PD members before another one fails.")
    return ok(seen)


def probe_stores(context: ProbeContext) -> ProbeOutcome:
    """All stores are up, and of one version."""
    return judge_stores(store_statuses(context.cluster.pd_http))


def judge_stores(found: Sequence[StoreStatus]) -> ProbeOutcome:
    """Judge the states of stores for `probe_stores`."""
    stores = [store for store in found if not store.is_tiflash]
    states = {store: f"store {store.id} ({store.address}) is {store.state}" for store in stores}
    away = [said for store, said in states.items() if store.state not in {"Up", _LEAVING}]
    leaving = [said for store, said in states.items() if store.state == _LEAVING]
    figures = (Figure("stores_up", len(stores) - len(away)), Figure("stores_away", len(away), critical="0"))
    if not stores:
        return fail("PD knows no store", "Start the stores, or check that --pd names the right cluster.", *figures)
    if away:
        return fail(listed(away), "Restart these stores, or remove them from the cluster, first.", *figures)
    if leaving:
        return warn(listed(leaving), "Wait until PD has moved their data to other stores.", *figures)
    versions = sorted({store.version for store in stores})
    if len(versions) > 1:
        return warn(
            f"versions {', '.join(versions)}",
            "Finish the upgrade: only features of the oldest version can be used.",
            *figures,
        )
    return ok(f"{len(stores)} up, version {versions[0]}", *figures)


def probe_version(context: ProbeContext) -> ProbeOutcome:
    """The oldest store can do all that tikv-br uses."""
    cluster, api_version = context.cluster, None
    stores = [store for store in cluster.pd.stores() if store.serves]
    with contextlib.suppress(ClusterError):  # the probe `api-version` reports it
        api_version = read_config(stores, cluster.config.tls, CONFIG_SECONDS).api_version
    check_skipped = context.options.cluster.skip_version_check
    return judge_version([store.version for store in stores], api_version, check_skipped=check_skipped)


def judge_version(
    found: Sequence[str], api_version: ApiVersion | None = None, *, check_skipped: bool = False
) -> ProbeOutcome:
    """See `probe_version`; `check_skipped`: commands will not refuse any version. Raises `ClusterUnfit` for what is no version."""
    known = sorted(map(Version.parse, found))
    if not known:
        return skipped("there is no store")
    unused = {TXN_REWRITE, *(OF_V2 if api_version not in {ApiVersion.V2, None} else ())}  # `restore txn` says it itself
    lacking = [each for each in CAPABILITIES if each.since and each not in unused and not supports(known[0], each)]
    refused = [f"{each.name} ({each.used_by}) needs {each.needed(known[0])}" for each in lacking if not each.older]
    if refused:
        needed = API_V2 if api_version is ApiVersion.V2 else RAW
        seen = f"{known[0]}: {'; '.join(refused)}"
        if check_skipped:
            return warn(seen, "Upgrade the stores; these commands may fail, or write rows that cannot be read.")
        if needed in lacking:
            return fail(seen, "Upgrade the stores; all commands refuse the cluster.")
        return warn(seen, "Upgrade the stores; these commands refuse the cluster.")
    differs = [f"without {each.name}: {each.older}" for each in lacking]
    if known[-1] > NEWEST_TRIED:
        return warn(f"{known[-1]}: the newest version that tikv-br was tried with is {NEWEST_TRIED}", "Test a restore.")
    return ok("; ".join([str(known[0]), *differs]))


def probe_api_version(context: ProbeContext) -> ProbeOutcome:
    """All stores run one API version; whether they keep TTLs follows from it."""
    cluster = context.cluster
    found: dict[int, ApiVersion] = {}
    silent: list[int] = []
    for store in (store for store in cluster.pd.stores() if store.serves):
        try:
            found[store.id] = store_config(store, cluster.config.tls, cluster.config.request_timeout).api_version
        except ClusterUnreachable:
            silent.append(store.id)
    versions = {version.label for version in found.values()}
    if not versions:
        return skipped("no store's status port answers")
    if len(versions) > 1:
        each = ", ".join(f"store {store_id}: {version.label}" for store_id, version in sorted(found.items()))
        return fail(each, "Give all stores the same storage.api-version and storage.enable-ttl.")
    if silent:
        advice = "Open the stores' status ports to this machine."
        return warn(f"API {versions.pop()}; no answer from {listed([f'store {each}' for each in silent])}", advice)
    return ok(f"API {versions.pop()} on {len(found)} {'store' if len(found) == 1 else 'stores'}")


def probe_ttl(context: ProbeContext) -> ProbeOutcome:
    """Report whether rows may expire."""
    has_ttl = context.cluster.api_version.has_ttl
    return ok("on" if has_ttl else "off: backups with expiring rows cannot be restored here")


def probe_clock(context: ProbeContext) -> ProbeOutcome:
    """This machine's clock agrees with PD's."""
    return judge_clock(measure_clock(context.cluster.pd))


def judge_clock(difference: ClockDifference) -> ProbeOutcome:
    """Judge the clock difference for `probe_clock`."""
    ahead = difference.ahead
    figure = Figure("clock", round(ahead, 3), "s", f"-{CLOCK_WARN:g}:{CLOCK_WARN:g}", f"-{CLOCK_FAIL:g}:{CLOCK_FAIL:g}")
    seen = f"{abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} PD"
    advice = "Synchronize this machine and PD with the same NTP servers."
    if difference.stalled:
        seen = f"PD's timestamps are {-ahead:.1f} s ahead of the clocks, after changes of PD's leader"
        advice = "Find out why the leader changed. Timestamps stand still until PD's clock has caught up; check the clocks then."
        return warn(seen, advice, figure)
    if abs(ahead) > CLOCK_FAIL:
        return fail(seen, advice, figure)
    return warn(seen, advice, figure) if abs(ahead) > CLOCK_WARN else ok(seen, figure)


def probe_space(context: ProbeContext) -> ProbeOutcome:
    """The stores' disks have room."""
    return judge_space(store_statuses(context.cluster.pd_http))


def judge_space(found: Sequence[StoreStatus]) -> ProbeOutcome:
    """Judge the free space for `probe_space`."""
    left = {store.id: 100 * store.available / store.capacity for store in found if store.capacity}
    if not left:
        return skipped("PD knows no store's capacity")
    figures = [
        Figure(f"free_store{store_id}", round(part, 1), "%", f"{SPACE_WARN:g}:", f"{SPACE_FAIL:g}:")
        for store_id, part in left.items()
    ]
    fullest = min(left, key=lambda store_id: left[store_id])
    seen = f"{left[fullest]:.0f} % left on store {fullest}, the fullest of {len(left)}"
    advice = "Add stores or free space before a restore: PD moves no regions to full stores."
    if left[fullest] < SPACE_FAIL:
        return fail(seen, advice, *figures)
    return warn(seen, advice, *figures) if left[fullest] < SPACE_WARN else ok(seen, *figures)


def probe_gc(context: ProbeContext) -> ProbeOutcome:
    """Check the delay of GC, and which service causes it."""
    cluster = context.cluster
    return judge_gc(gc_status(cluster.pd_http), physical_ms(cluster.pd.tso()))


def judge_gc(status: GcStatus, now_ms: int) -> ProbeOutcome:
    """See `probe_gc`; ``now_ms`` is PD's time."""

    def hours(ts: int) -> float:
        return (now_ms - physical_ms(ts)) / 3_600_000

    figures = [Figure("services", len(status.services))]
    seen = f"safe point is {hours(status.safe_point):.1f} h old" if status.safe_point else "has never run"
    if status.safe_point:
        figures.append(Figure("gc_age", round(hours(status.safe_point) * 3600), "s"))
    if not status.services:
        return ok(f"{seen}, no service safe point", *figures)
    oldest = min(status.services, key=lambda each: each.safe_point)
    age = hours(oldest.safe_point)
    figures.append(Figure("oldest_service", round(age * 3600), "s", f"{GC_WARN_HOURS * 3600:g}"))
    number = len(status.services)
    seen += (
        f"; {number} service safe {'point' if number == 1 else 'points'}, the oldest by {oldest.service} ({age:.1f} h)"
    )
    if age > GC_WARN_HOURS:
        advice = f"If {oldest.service} is no longer needed, remove its service safe point: it keeps old versions from being removed."
        return warn(seen, advice, *figures)
    return ok(seen, *figures)


def probe_schedulers(context: ProbeContext) -> ProbeOutcome:
    """Check that no scheduler, and no merging of regions, is still paused by an import."""
    pd_http = context.cluster.pd_http
    paused = pd_http.schedulers(paused=True)
    merging = merges_regions(pd_http)
    if not paused and merging:
        return ok("none is paused")
    seen = [f"paused: {listed(paused)}"] if paused else []
    seen += [] if merging else ["merging of regions is off"]
    return warn(
        "; ".join(seen),
        "If no restore is running: run `pd-ctl scheduler resume`, and reset schedule.max-merge-region-size.",
        Figure("paused_schedulers", len(paused), warn="0"),
    )


def probe_import_mode(context: ProbeContext) -> ProbeOutcome:
    """Check that no store is in import mode, and that no restore of the backup at the storage has left it on."""
    cluster = context.cluster
    folder = layout.import_mode_folder(cluster.cluster_id)
    if context.options.storage is not None and any(context.store.list(folder)):
        return warn(
            "a restore of the backup at the storage has not ended it",
            "If that restore is no longer running, run it again: it resumes, and ends import mode.",
        )
    try:
        importing = [
            store.id for store in cluster.pd.stores() if store.serves and cluster.store(store.id).is_importing()
        ]
    except CallUnsupported:
        return skipped("these stores do not report it; they leave import mode after 10 minutes")
    if importing:
        names = listed([f"store {store_id}" for store_id in importing])
        return warn(f"{names} in import mode", "If no restore is running, the stores leave it after 10 minutes.")
    return ok("no store is in it")


CLUSTER_PROBES = (
    Probe("pd", probe_pd),
    Probe("stores", probe_stores),
    Probe("version", probe_version),
    Probe("api-version", probe_api_version),
    Probe("ttl", probe_ttl),
    Probe("clock", probe_clock),
    Probe("store-space", probe_space),
    Probe("gc", probe_gc),
    Probe("schedulers", probe_schedulers),
    Probe("import-mode", probe_import_mode),
)
