"""The plan of a dry run is the one that the restore then follows."""

from __future__ import annotations

from tests.integration.restore.conftest import FILES, ROWS, rows_of
from tests.integration.restore.restores import break_off, leftovers
from tests.support.live_cluster import LiveCluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.plan import RestorePlan
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

REGION_BYTES = 60_000


def planned(live: LiveCluster, location: StorageLocation, **changes: object) -> RestorePlan:
    """Plan of a dry run, which must change nothing."""
    plans: list[RestorePlan] = []
    options = RestoreOptions(live.config, location, region_bytes=REGION_BYTES, dry_run=True, **changes)  # type: ignore[arg-type]
    regions, rows = starts(live), rows_of(live)  # PD moves replicas whenever it likes
    assert restore(options, on_plan=plans.append).dry_run
    assert (starts(live), rows_of(live)) == (regions, rows)
    (plan,) = plans
    return plan


def starts(live: LiveCluster) -> set[bytes]:
    """Start keys of regions: RPC keys."""
    codec = KeyCodec(ApiVersion.V2)
    return {codec.from_bound(bytes.fromhex(region["start"])) for region in live.regions()}


def test_the_restore_follows_the_plan(source: StorageLocation, target: LiveCluster) -> None:
    """Files, sums and splits are those that the restore then needs and makes; nothing stays behind of the dry run."""
    plan = planned(target, source)
    assert leftovers(source) == []
    before = starts(target)
    summary = restore(RestoreOptions(target.config, source, region_bytes=REGION_BYTES))
    assert starts(target) - before == set(plan.splits)
    assert len(plan.splits) > 2
    assert (len(plan.parts), plan.total_kvs, plan.total_bytes, plan.size) == (
        summary.files,
        len(ROWS),
        summary.total_bytes,
        summary.backup_size,
    )
    again = planned(target, source, allow_overwrite=True)
    assert again.splits == ()
    assert again.regions == plan.regions + len(plan.splits)


def test_the_plan_of_a_restore_that_goes_on(source: StorageLocation, target: LiveCluster) -> None:
    """Rows that an unfinished restore ingested are not planned again, and the dry run leaves its records alone."""
    break_off(target, source)
    records = leftovers(source)
    plan = planned(target, source)
    assert plan.resumed >= FILES // 2
    assert plan.resumed + len(plan.parts) == restore(RestoreOptions(target.config, source)).files
    assert len(records) > FILES // 2
