"""All probes against running clusters and storages, in order and out of it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.cloud_servers import ACCOUNT, CONTAINER, azurite_server
from tests.integration.s3_servers import S3Server, moto_server
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backupset.layout import import_mode_folder
from tikv_br.check.cluster_probes import probe_import_mode
from tikv_br.check.probe import CheckOptions, ProbeContext, Result, Status
from tikv_br.check.run import check
from tikv_br.check.storage_probes import probe_store_storage
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.executor import ExecutorChoice, ExecutorOptions

PATIENT = 60.0
"""Seconds for a probe, on a busy machine."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster of three stores."""
    with live_cluster(tmp_path_factory.mktemp("check"), ApiVersion.V2, stores=3, disconnect_delay=0.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    """An S3 server."""
    with moto_server() as server:
        yield server


def look(
    cluster: ClusterConfig, storage: StorageLocation | None = None, executor: ExecutorChoice = "driver"
) -> dict[str, Result]:
    """All results by name."""
    results = check(CheckOptions(cluster, storage, ExecutorOptions(executor=executor), timeout=PATIENT))
    return {result.name: result for result in results}


def bad(results: dict[str, Result]) -> dict[str, str]:
    """Probes that did not pass."""
    wrong = {Status.WARN, Status.FAIL}
    return {name: result.outcome.seen for name, result in results.items() if result.outcome.status in wrong}


@pytest.mark.core("check")
def test_a_sound_cluster_and_directory(live: LiveCluster, tmp_path: Path) -> None:
    """Nothing is wrong, unknown results are skipped, and the directory is left without an object."""
    results = look(live.config, StorageLocation("local", str(tmp_path)))
    bad_ones = {name: seen for name, seen in bad(results).items() if name not in {"clock", "storage-space"}}
    assert bad_ones == {}
    assert results["api-version"].outcome.seen == "API v2 on 3 stores"
    assert results["ttl"].outcome.seen == "on"
    assert str(live.cluster.cluster_id) in results["pd"].outcome.seen
    assert {name for name, result in results.items() if result.outcome.status is Status.SKIPPED} == {
        "store-space",  # the playground has no disks of its own
        "import-mode",
        "java",
        "spark",
    }
    assert list(tmp_path.iterdir()) == []


def test_storage_that_stores_cannot_open(live: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning has the reason and the alternatives: a folder of this machine only, and missing credentials."""
    with azurite_server() as azurite:
        options = CheckOptions(live.config, azurite.location("p"), ExecutorOptions(executor="driver"), timeout=PATIENT)
        assert stores_of(options) == (Status.OK, "opened by 3 stores", "")
        assert b"<Name>" not in azurite.request("GET", CONTAINER, "restype=container&comp=list")[1]
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)  # of this process, not of the stores
        own = replace(options, storage=azurite.location("p", account_name=""), send_credentials=False)
        status, seen, advice = stores_of(own)
        assert status is Status.WARN
        assert "cannot open it: " in seen
        assert "--engine scan" in advice
        identity = replace(options, storage=azurite.location("p", account_key="", sas_token=""))
        with ProbeContext(identity) as context:
            monkeypatch.setattr(ProbeContext, "store", None)  # which has no token either
            outcome = probe_store_storage(context)
        assert (outcome.status, "not a token of an identity" in outcome.seen) == (Status.WARN, True)


def stores_of(options: CheckOptions) -> tuple[Status, str, str]:
    """Result of the probe of the stores' storage."""
    with ProbeContext(options) as context:
        outcome = probe_store_storage(context)
    return outcome.status, outcome.seen, outcome.advice


@pytest.mark.emulator_only("PD knows at once that a store is dead")
def test_a_dead_store(live: LiveCluster) -> None:
    """It is named, its silence is no disagreement on the API version, and the other probes are well."""
    live.kill_store(live.store_ids[1])
    try:
        results = look(structs.replace(live.config, request_timeout=20.0, retry_budget=1.0))
        found = bad(results)
    finally:
        live.heal()
    assert found.keys() - {"clock"} == {"stores", "api-version"}
    assert f"store {live.store_ids[1]} " in found["stores"]
    assert results["stores"].outcome.status is Status.FAIL
    assert results["api-version"].outcome.status is Status.WARN


def test_remains_of_an_import_are_reported(live: LiveCluster) -> None:
    """A paused scheduler and disabled merging are reported, until both are undone."""
    pd = live.cluster.pd_http
    pd.pause_scheduler("balance-region-scheduler", 300)
    set_merge_size(live, 0)
    try:
        seen = bad(look(live.config))["schedulers"]
    finally:
        pd.pause_scheduler("balance-region-scheduler", 0)
        set_merge_size(live, 54)
    assert seen == "paused: balance-region-scheduler; merging of regions is off"
    assert "schedulers" not in bad(look(live.config))


def set_merge_size(live: LiveCluster, size: int) -> None:
    """As tools do for an import."""
    connection = http.client.HTTPConnection(live.pd, timeout=30)
    connection.request("POST", "/pd/api/v1/config", json.dumps({"schedule.max-merge-region-size": size}))
    assert connection.getresponse().status == http.client.OK
    connection.close()


def test_a_service_that_holds_gc_back(live: LiveCluster) -> None:
    """A safe point of two days ago is worth a warning with its name."""
    pd = live.cluster.pd
    pd.update_service_safe_point("forgotten-feed", 600, minus_seconds(pd.tso(), 48 * 3600))
    try:
        found = bad(look(live.config))
    finally:
        pd.update_service_safe_point("forgotten-feed", 0, 0)
    assert "forgotten-feed (48.0 h)" in found["gc"]


def test_stores_in_import_mode(live: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing stores are named; the playground is as silent as TiKV 9.0, so the test gives the answer."""
    first = live.store_ids[0]
    monkeypatch.setattr(StoreClient, "is_importing", lambda client: client.store.id == first)
    with ProbeContext(CheckOptions(live.config)) as around:
        verdict = probe_import_mode(around)
    assert verdict.status is Status.WARN
    assert verdict.seen == f"store {first} in import mode"


def test_import_mode_that_a_restore_left(live: LiveCluster, tmp_path: Path) -> None:
    """A restore's own record of it lies beside the backup until it is put back."""
    place = StorageLocation("local", str(tmp_path))
    record = f"{import_mode_folder(live.cluster.cluster_id)}/0123456789abcdef.json"
    open_store(place).put(record, b"{}")
    assert "has not ended it" in bad(look(live.config, place))["import-mode"]
    open_store(place).delete(record)
    assert "import-mode" not in bad(look(live.config, place))


def test_a_v1_cluster(tmp_path: Path) -> None:
    """Has no TTL, and that is no fault."""
    with live_cluster(tmp_path / "v1", ApiVersion.V1, stores=1) as cluster:
        results = look(cluster.config)
    assert results["ttl"].outcome.seen.startswith("off")
    assert results["api-version"].outcome.seen == "API v1 on 1 store"
    assert results["ttl"].outcome.status is Status.OK


def test_unreachable_cluster_and_storage_fail_one_probe_each(moto: S3Server) -> None:
    """One probe of the cluster and one of the storage fail; dependent ones are skipped; the machine is probed."""
    began = time.monotonic()
    nowhere = ClusterConfig(pd=("127.0.0.1:1",), connect_timeout=2.0, retry_budget=0.5)
    results = look(nowhere, moto.location("x", bucket="no-such-bucket"), executor="auto")
    assert {name for name, result in results.items() if result.outcome.status is Status.FAIL} >= {"pd"}
    statuses = {name: result.outcome.status for name, result in results.items()}
    assert {statuses[name] for name in ("stores", "clock", "gc", "version")} == {Status.SKIPPED}
    assert statuses["java"] is Status.OK
    assert "127.0.0.1:1" in results["pd"].outcome.seen
    assert any(statuses[name] is Status.FAIL for name in statuses if name.startswith("storage"))
    assert time.monotonic() - began < 2 * PATIENT


def test_s3(moto: S3Server) -> None:
    """A bucket passes, and nothing stays in it."""
    nowhere = ClusterConfig(pd=("127.0.0.1:1",), connect_timeout=2.0, retry_budget=0.5)
    results = look(nowhere, moto.location("backups/tonight"))
    assert bad(results).keys() == {"pd"}
    assert results["storage-space"].outcome.status is Status.SKIPPED
    assert moto.admin.list_objects_v2(Bucket="backups").get("KeyCount") == 0


def test_storage_that_cannot_be_written(live: LiveCluster, tmp_path: Path) -> None:
    """A file where a directory should be: every probe that writes fails, with the cause."""
    (tmp_path / "file").write_bytes(b"")
    results = look(live.config, StorageLocation("local", str(tmp_path / "file" / "below")))
    writing = ("storage-write", "storage-conditional-put", "storage-list", "storage-multipart", "storage-delete")
    assert {results[name].outcome.status for name in writing} == {Status.FAIL}
    assert all(results[name].outcome.advice for name in writing)


def test_java_that_is_missing(live: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed only where Spark was asked for."""
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    by_choice = look(live.config, executor="auto")["java"]
    asked_for = look(live.config, executor="spark")
    assert by_choice.outcome.status is Status.WARN
    assert asked_for["java"].outcome.status is Status.FAIL
    assert asked_for["spark"].outcome.status is Status.FAIL
