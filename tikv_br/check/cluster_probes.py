"""What is looked at in a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence

from formats.api_version import ApiVersion
from tikv_br.backupset import layout
from tikv_br.check.probe import Figure, Probe, Verdict, fail, listed, ok, skipped, warn
from tikv_br.check.surroundings import Surroundings
from tikv_br.cluster import pd_status
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.pd_status import GcStatus, StoreStatus
from tikv_br.cluster.timestamp import physical_ms
from tikv_br.cluster.topology import store_api_version
from tikv_br.errors import ClusterUnreachable

CLOCK_WARN, CLOCK_FAIL = 1.0, 5.0
"""Seconds between this clock and PD's; comparisons of rows that expire allow for 5."""
CLOCK_QUESTIONS = 5
SPACE_WARN, SPACE_FAIL = 20.0, 10.0
"""Per cent of a store's disk that is left; below 20 PD moves no more regions to it (low-space-ratio)."""
_LEAVING = "Offline"
"""Of a store on its way out: it serves until its data has moved."""
GC_WARN_HOURS = 24.0
"""How long a service may hold GC back before it is worth a word."""


def look_at_pd(around: Surroundings) -> Verdict:
    """PD answers, has a leader, and all members are well."""
    cluster = around.connection
    leader = cluster.pd.connection.leader.address
    health = pd_status.member_health(cluster.pd_http)
    sick = [name for name, well in health.items() if not well]
    seen = f"leader {leader}, {len(health)} {'member' if len(health) == 1 else 'members'}, cluster {cluster.cluster_id}"
    if sick:
        return warn(f"{seen}; not well: {listed(sick)}", "Restore these PD members before another one fails.")
    return ok(seen)


def look_at_stores(around: Surroundings) -> Verdict:
    """All stores are up, and of one version."""
    return judge_stores(pd_status.store_statuses(around.cluster.pd_http))


def judge_stores(found: Sequence[StoreStatus]) -> Verdict:
    """See `look_at_stores`."""
    stores = [store for store in found if not store.is_tiflash]
    states = {store: f"store {store.id} ({store.address}) is {store.state}" for store in stores}
    away = [said for store, said in states.items() if store.state not in {"Up", _LEAVING}]
    leaving = [said for store, said in states.items() if store.state == _LEAVING]
    figures = (Figure("stores_up", len(stores) - len(away)), Figure("stores_away", len(away), critical="0"))
    if not stores:
        return fail("PD knows no store", "Start the stores, or check that --pd names the right cluster.", *figures)
    if away:
        return fail(listed(away), "Bring these stores back, or remove them for good, first.", *figures)
    if leaving:
        return warn(listed(leaving), "Wait until their data has moved: until then regions are on the move.", *figures)
    versions = sorted({store.version for store in stores})
    if len(versions) > 1:
        return warn(f"versions {', '.join(versions)}", "Finish the upgrade: the oldest decides what works.", *figures)
    return ok(f"{len(stores)} up, version {versions[0]}", *figures)


def look_at_api_version(around: Surroundings) -> Verdict:
    """All stores run one API version; whether they keep TTLs follows from it."""
    cluster = around.cluster
    found: dict[int, ApiVersion] = {}
    silent: list[int] = []
    for store in (store for store in cluster.pd.stores() if store.serves):
        try:
            found[store.id] = store_api_version(store, cluster.config.tls, cluster.config.request_timeout)
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


def look_at_ttl(around: Surroundings) -> Verdict:
    """Whether rows may expire."""
    has_ttl = around.cluster.api_version.has_ttl
    return ok("on" if has_ttl else "off: backups with expiring rows cannot be restored here")


def look_at_clock(around: Surroundings) -> Verdict:
    """This machine's clock agrees with PD's; of some questions, the one answered soonest says most."""
    pd = around.cluster.pd
    questions: list[tuple[float, float]] = []
    for _ in range(CLOCK_QUESTIONS):
        before = time.time()
        pd_time = physical_ms(pd.tso()) / 1000
        after = time.time()
        questions.append((after - before, (before + after) / 2 - pd_time))
    return judge_clock(min(questions)[1])


def judge_clock(ahead: float) -> Verdict:
    """See `look_at_clock`; ``ahead`` is in seconds."""
    figure = Figure("clock", round(ahead, 3), "s", f"-{CLOCK_WARN:g}:{CLOCK_WARN:g}", f"-{CLOCK_FAIL:g}:{CLOCK_FAIL:g}")
    seen = f"{abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} PD"
    advice = "Let this machine and PD's keep time by the same NTP servers."
    if abs(ahead) > CLOCK_FAIL:
        return fail(seen, advice, figure)
    return warn(seen, advice, figure) if abs(ahead) > CLOCK_WARN else ok(seen, figure)


def look_at_space(around: Surroundings) -> Verdict:
    """The stores' disks have room."""
    return judge_space(pd_status.store_statuses(around.cluster.pd_http))


def judge_space(found: Sequence[StoreStatus]) -> Verdict:
    """See `look_at_space`."""
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


def look_at_gc(around: Surroundings) -> Verdict:
    """How far behind GC is, and who holds it."""
    cluster = around.cluster
    return judge_gc(pd_status.gc_status(cluster.pd_http), physical_ms(cluster.pd.tso()))


def judge_gc(status: GcStatus, now_ms: int) -> Verdict:
    """See `look_at_gc`; ``now_ms`` is PD's time."""

    def hours(ts: int) -> float:
        return (now_ms - physical_ms(ts)) / 3_600_000

    figures = [Figure("services", len(status.services))]
    seen = f"stands {hours(status.safe_point):.1f} h back" if status.safe_point else "has never run"
    if status.safe_point:
        figures.append(Figure("gc_age", round(hours(status.safe_point) * 3600), "s"))
    if not status.services:
        return ok(f"{seen}, no service holds it", *figures)
    oldest = min(status.services, key=lambda each: each.safe_point)
    age = hours(oldest.safe_point)
    figures.append(Figure("oldest_service", round(age * 3600), "s", f"{GC_WARN_HOURS * 3600:g}"))
    number = len(status.services)
    seen += f"; held by {number} {'service' if number == 1 else 'services'}, longest by {oldest.service} ({age:.1f} h)"
    if age > GC_WARN_HOURS:
        advice = f"If {oldest.service} is not needed any more, remove its service safe point: old versions pile up."
        return warn(seen, advice, *figures)
    return ok(seen, *figures)


def look_at_schedulers(around: Surroundings) -> Verdict:
    """Nothing that an import paused stands still."""
    pd_http = around.cluster.pd_http
    paused = pd_http.schedulers(paused=True)
    merging = pd_status.merges_regions(pd_http)
    if not paused and merging:
        return ok("none is paused")
    seen = [f"paused: {listed(paused)}"] if paused else []
    seen += [] if merging else ["merging of regions is off"]
    return warn(
        "; ".join(seen),
        "If no restore is running: `pd-ctl scheduler resume`, and give schedule.max-merge-region-size its value back.",
        Figure("paused_schedulers", len(paused), warn="0"),
    )


def look_at_import_mode(around: Surroundings) -> Verdict:
    """No store was left in import mode, as far as stores tell, and no restore of the backup at the storage has left it so."""
    cluster = around.cluster
    folder = layout.import_mode_folder(cluster.cluster_id)
    if around.options.storage is not None and any(around.store.list(folder)):
        return warn(
            "a restore of the backup at the storage has not put it back",
            "If it does not run any more: run the same restore again, which puts everything back.",
        )
    try:
        importing = [store.id for store in cluster.pd.stores() if store.serves and cluster.store(store.id).importing()]
    except CallUnsupported:
        return skipped("these stores do not tell; they leave import mode by themselves after 10 minutes")
    if importing:
        names = listed([f"store {store_id}" for store_id in importing])
        return warn(f"{names} in import mode", "If no restore is running, they leave it after 10 minutes.")
    return ok("no store is in it")


CLUSTER_PROBES = (
    Probe("pd", look_at_pd),
    Probe("stores", look_at_stores),
    Probe("api-version", look_at_api_version),
    Probe("ttl", look_at_ttl),
    Probe("clock", look_at_clock),
    Probe("store-space", look_at_space),
    Probe("gc", look_at_gc),
    Probe("schedulers", look_at_schedulers),
    Probe("import-mode", look_at_import_mode),
)
