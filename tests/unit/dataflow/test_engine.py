"""Choice of engine and executor, with reasons."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.unit.dataflow.samples import options
from tikv_br.backupset.files import FileKind
from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.topology import Store, StoreState
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import CLUSTER_SLOTS, Interval, choose_engine
from tikv_br.errors import SparkUnavailable
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.formats.sst.compression import Compression
from tikv_br.storage.crypter import Crypter, SecretText
from tikv_br.storage.url import parse
from tikv_br.tasks import session
from tikv_br.tasks.executor import DRIVER_THREADS, MIN_SPARK_BYTES, MIN_SPARK_TASKS

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
PARQUET = FileKind.PARQUET


@pytest.mark.parametrize(
    ("source", "target", "changes", "name", "reason"),
    [
        (V1, V1, {}, "scan", "no timestamp or expiry to keep"),
        (V1, V1TTL, {}, "scan", "no timestamp or expiry to keep"),
        (V1, V2, {}, "scan", "no timestamp or expiry to keep"),
        (V1TTL, V1TTL, {}, "store", "keep their expiry"),
        (V1TTL, V2, {}, "store", "keep their expiry"),
        (V1TTL, V2, {"assume_no_ttl": True}, "scan", "no key has a TTL"),
        (V2, V2, {}, "store", "timestamps"),
        (V2, V2, {"assume_no_ttl": True}, "store", "timestamps"),
        (V2, V2, {"engine": "scan"}, "scan", "requested with --engine"),
        (
            V2,
            V2,
            {"compression": Compression.NONE},
            "store",
            "timestamps and expiry; stores cannot write uncompressed",
        ),
        (
            V1TTL,
            V2,
            {"compression": Compression.NONE},
            "store",
            "keep their expiry; stores cannot write uncompressed",
        ),
        (V1, V2, {"compression": Compression.NONE}, "scan", "no timestamp or expiry to keep"),
        (V1, V2, {"engine": "store"}, "store", "requested with --engine"),
        (V2, V1TTL, {}, "store", "keep their expiry"),
        (V2, V1TTL, {"assume_no_ttl": True}, "scan", "no key has a TTL"),
        (V2, V1, {}, "store", "without a request per key"),
        (V1TTL, V1, {}, "store", "without a request per key"),
        (V1TTL, V1, {"assume_no_ttl": True}, "scan", "no key has a TTL"),
        (V1, V1, {"file_kind": PARQUET}, "scan", "no timestamp or expiry to keep"),
        (V2, V2, {"file_kind": PARQUET}, "store", "timestamps and expiry; stores cannot write Parquet"),
        (V2, V2, {"file_kind": PARQUET, "compression": Compression.NONE}, "store", "timestamps"),
    ],
)
def test_auto_takes_the_stores_where_something_would_be_lost(
    source: ApiVersion, target: ApiVersion, changes: dict[str, Any], name: str, reason: str
) -> None:
    """To a directory: what a scan would lose decides, and a flag beats the rule."""
    engine = choose_engine(options(**changes), source, target)
    assert engine.name == name
    assert reason in engine.reason


KEY = ("access-key=a", "secret-access-key=b")
AZURE_KEY = "azure://box/p?account-name=acc&account-key=a2V5"


def cloud(url: str, **changes: Any) -> BackupOptions:  # noqa: ANN401 - any field
    """Options of a backup to a storage URL; S3 gets keys."""
    query = "&".join(KEY)
    place = url if not url.startswith("s3:") else f"{url}{'&' if '?' in url else '?'}{query}"
    return options(**{"storage": parse(place), **changes})


def store_at(address: str, version: str = "8.5.7") -> Store:
    """A store that PD knows."""
    return Store(1, address, "", StoreState.UP, version)


@pytest.mark.parametrize(
    ("url", "source", "target", "changes", "name", "reason"),
    [
        ("s3://box/p", V1, V1, {}, "store", "stores write to s3, and no row passes"),
        ("s3://box/p", V1, V2, {}, "store", "stores write to s3, and no row passes"),
        (AZURE_KEY, V1, V2, {}, "store", "stores write to azure"),
        ("gcs://box/p?credentials-file=/key.json", V1, V2, {}, "store", "stores write to gcs"),
        ("s3://box/p", V1TTL, V2, {"assume_no_ttl": True}, "store", "no key has a TTL; stores write"),
        ("s3://box/p", V2, V2, {}, "store", "timestamps"),
        ("s3://box/p", V1TTL, V1TTL, {}, "store", "keep their expiry"),
        ("s3://box/p", V1, V1TTL, {}, "scan", "stores cannot write API v1ttl"),
        ("s3://box/p", V1, V2, {"file_kind": PARQUET}, "scan", "stores cannot write Parquet"),
        ("s3://box/p", V1, V2, {"compression": Compression.NONE}, "scan", "stores cannot write uncompressed"),
        ("s3://box/p", V1, V2, {"file_bytes": 1 << 20}, "scan", "--file-size"),
        ("s3://box/p", V1, V2, {"engine": "scan"}, "scan", "requested"),
        ("s3://box/p?session-token=t", V1, V2, {}, "scan", "temporary"),
        ("s3://box/p?session-token=t", V1, V2, {"send_credentials": False}, "store", "stores write to s3"),
        ("azure://box/p?account-name=acc", V1, V2, {}, "scan", "an identity of this machine"),
        ("azure://box/p?account-name=acc", V1, V2, {"send_credentials": False}, "store", "stores write to azure"),
        ("gcs://box/p", V1, V2, {}, "scan", "an identity of this machine"),
        ("gcs://box/p", V1, V2, {"send_credentials": False}, "store", "stores write to gcs"),
        ("s3://box/p?endpoint=http://127.0.0.1:9000", V1, V2, {}, "scan", "cannot connect to 127.0.0.1"),
        ("s3://box/p?endpoint=http://localhost:9000", V1, V2, {}, "scan", "cannot connect to localhost"),
        ("s3://box/p?endpoint=http://[::1]:9000", V1, V2, {}, "scan", "cannot connect to ::1"),
        ("s3://box/p?endpoint=http://10.0.1.9:9000", V1, V2, {}, "store", "stores write to s3"),
    ],
)
def test_auto_takes_the_stores_where_they_reach_the_storage(
    url: str,
    source: ApiVersion,
    target: ApiVersion,
    changes: dict[str, Any],
    name: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a loss either way cost decides: stores write to a cloud that they can be expected to open, else a scan does."""
    for variable in [each for each in os.environ if each.startswith(("AWS_", "AZURE_", "GOOGLE_", "SERVICE_ACCOUNT"))]:
        monkeypatch.delenv(variable)
    engine = choose_engine(cloud(url, **changes), source, target, [store_at("10.0.1.7:20160")])
    assert engine.name == name
    assert reason in engine.reason
    assert not engine.rewrites_files


def test_an_endpoint_of_this_machine_is_reached_by_its_stores() -> None:
    """A server on loopback serves stores that listen there, too, and no others."""
    wanted = cloud("s3://box/p?endpoint=http://127.0.0.1:9000")
    here, away = store_at("127.0.0.1:20160"), store_at("tikv-1.example:20160")
    assert [choose_engine(wanted, V1, V2, stores).name for stores in ([here], [here, away])] == ["store", "scan"]


def test_a_scan_reads_stores_that_are_too_old_to_write_files() -> None:
    """`auto` does not choose what is then refused."""
    old = choose_engine(cloud("s3://box/p"), V1, V1, [store_at("10.0.1.7:20160", "6.0.0")])
    assert (old.name, "10.0.1.7:20160 is too old" in old.reason) == ("scan", True)


def test_a_key_is_not_sent_in_clear_by_choice() -> None:
    """Files that are encrypted are written by stores only over TLS, unless that is requested."""
    secret = Crypter("aes256-ctr", SecretText("00" * 32))
    place = replace(cloud("s3://box/p").storage, crypter=secret)
    plain = options(storage=place)
    over_tls = structs.replace(plain, cluster=structs.replace(plain.cluster, tls=TlsFiles(ca="/ca.pem")))
    assert [choose_engine(each, V1, V2).name for each in (plain, over_tls)] == ["scan", "store"]


@pytest.mark.parametrize(
    ("source", "target", "changes", "rewrites"),
    [
        (V1, V1, {}, False),
        (V1, V1TTL, {}, True),
        (V1, V2, {}, False),
        (V1TTL, V1, {}, True),
        (V2, V1, {}, True),
        (V2, V1TTL, {}, True),
        (V2, V2, {"file_kind": PARQUET}, True),
        (V2, V2, {"compression": Compression.NONE}, True),
    ],
)
def test_formats_that_stores_do_not_write_are_rewritten(
    source: ApiVersion, target: ApiVersion, changes: dict[str, Any], rewrites: bool
) -> None:
    """The reason mentions that the bytes of the stores' files pass through this machine."""
    engine = choose_engine(options(engine="store", **changes), source, target)
    assert (engine.name, engine.rewrites_files, "rewritten" in engine.reason) == ("store", rewrites, rewrites)
    assert engine.stores_write_final_files is not rewrites


CLUSTER = "spark://host:7077"


@pytest.mark.parametrize(
    ("changes", "size", "tasks", "executor", "reason"),
    [
        ({"engine": "scan"}, MIN_SPARK_BYTES - 1, 3, "driver", "estimated size 4,09"),
        ({"engine": "scan"}, MIN_SPARK_BYTES, 3, "spark", "estimated size 4,09"),
        ({"engine": "scan", "executor": "driver"}, MIN_SPARK_BYTES, 3, "driver", "requested"),
        ({"engine": "scan", "executor": "spark"}, 0, 3, "spark", "requested"),
        ({"engine": "scan", "spark_master": CLUSTER}, MIN_SPARK_BYTES - 1, 3, "driver", "estimated size 4,09"),
        ({"engine": "scan", "spark_master": CLUSTER}, MIN_SPARK_BYTES, 3, "spark", "estimated size 4,09"),
        ({"engine": "scan", "spark_master": CLUSTER, "executor": "spark"}, 0, 3, "spark", "requested"),
        ({"engine": "store", "spark_master": CLUSTER}, MIN_SPARK_BYTES, 3, "driver", "of 3 tasks"),
        ({"engine": "store", "spark_master": CLUSTER}, 0, MIN_SPARK_TASKS, "spark", "of 4,000 tasks"),
        ({"engine": "store"}, MIN_SPARK_BYTES, 3, "driver", "of 3 tasks; Spark pays off from 4,000"),
        ({"engine": "store"}, 0, MIN_SPARK_TASKS + 812, "spark", "of 4,812 tasks; Spark pays off from 4,000"),
        ({"engine": "store", "rate_limit": 1}, 0, MIN_SPARK_TASKS, "driver", "--ratelimit"),
        ({"engine": "store", "file_kind": PARQUET}, MIN_SPARK_BYTES, 3, "spark", "estimated size"),
        ({"engine": "store", "executor": "spark"}, 0, 3, "spark", "requested"),
    ],
)
def test_the_plan_decides_on_the_executor(
    changes: dict[str, Any], size: int, tasks: int, executor: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark, on this machine or a cluster, for many bytes that pass through tasks, for very many tasks, and if it was requested."""
    monkeypatch.setattr(session, "check_java", lambda: None)
    plan = [Interval(EVERY_KEY, size if not number else 0, 1) for number in range(tasks)]
    wanted = options(**changes)
    engine = choose_engine(wanted, V1, V1).settle_executor(wanted, plan)
    assert engine.executor == executor
    assert reason in engine.executor_reason


@pytest.mark.parametrize(("engine", "size", "tasks"), [("scan", MIN_SPARK_BYTES, 3), ("store", 0, MIN_SPARK_TASKS)])
def test_the_reason_says_that_spark_cannot_start(
    engine: str, size: int, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Java a plan that Spark would run stays on threads, and neither its size nor its tasks are given as the reason."""

    def no_java() -> int:
        raise SparkUnavailable("Java not found")

    monkeypatch.setattr(session, "check_java", no_java)
    wanted = options(engine=engine)
    settled = choose_engine(wanted, V1, V1).settle_executor(wanted, [Interval(EVERY_KEY, size, 1)] * tasks)
    assert (settled.executor, settled.executor_reason) == ("driver", "Spark cannot start: Java not found")


@pytest.mark.parametrize(("size", "slots"), [(MIN_SPARK_BYTES - 1, os.cpu_count()), (MIN_SPARK_BYTES, CLUSTER_SLOTS)])
def test_a_cluster_that_is_not_used_does_not_size_the_threads(
    size: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for the slots of a Spark cluster that stays on this machine runs on as many threads as it has processors."""
    monkeypatch.setattr(session, "check_java", lambda: None)
    wanted = options(engine="scan", spark_master=CLUSTER)
    assert choose_engine(wanted, V1, V1).settle_executor(wanted, [Interval(EVERY_KEY, size, 1)]).slots == slots


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({"concurrency": 7}, 7),
        ({"spark_master": "local[3]"}, 3),
        ({"spark_master": "local[5,4]"}, 5),
        ({"spark_master": "local"}, 1),
        ({"spark_master": "local[*]"}, os.cpu_count()),
        ({"spark_master": "spark://host:7077"}, CLUSTER_SLOTS),
        ({"spark_master": "spark://host:7077", "executor": "driver"}, os.cpu_count()),
        ({"engine": "store"}, DRIVER_THREADS),
        ({"engine": "store", "concurrency": 3}, 3),
    ],
)
def test_slots_follow_concurrency_then_executor(changes: dict[str, Any], slots: int) -> None:
    """The flag counts first, then what the executor has room for."""
    assert choose_engine(options(**changes), V1, V1).slots == slots


@pytest.mark.parametrize(
    ("executor", "master", "concurrency", "tasks", "share"),
    [
        ("driver", "local[*]", 8, 100, 1000),
        ("spark", "local[4]", None, 100, 250),
        ("spark", "local[4]", None, 3, 334),
        ("spark", "local[4]", None, 0, 1000),
        ("spark", "spark://host:7077", 10, 100, 100),
        ("spark", "local[*]", 5, 100, 200),
        ("spark", "local[4]", 2, 100, 500),
    ],
)
def test_a_rate_limit_is_divided_among_processes(
    executor: str, master: str, concurrency: int | None, tasks: int, share: int
) -> None:
    """One process on the driver, else as many as tasks run at once: together they never take more than the limit."""
    engine = choose_engine(options(executor=executor, spark_master=master, concurrency=concurrency), V1, V1)
    assert RateLimit(1000).share(engine.executor, engine.slots, tasks).bytes_per_second == share
    assert not RateLimit(0).share(engine.executor, engine.slots, tasks)
