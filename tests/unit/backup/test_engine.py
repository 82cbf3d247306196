"""Which engine runs, why, and where its tasks do."""

from __future__ import annotations

import os
from typing import Any

import pytest

from formats.api_version import ApiVersion
from formats.sst.compression import Compression
from tests.unit.backup.test_options import options
from tikv_br.backup.engine import CLUSTER_SLOTS, choose_engine
from tikv_br.backupset.files import FileKind
from tikv_br.spark.executor import DRIVER_THREADS

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
        (V1TTL, V2, {"assume_no_ttl": True}, "scan", "no key is taken to expire"),
        (V2, V2, {}, "store", "timestamps"),
        (V2, V2, {"assume_no_ttl": True}, "store", "timestamps"),
        (V2, V2, {"engine": "scan"}, "scan", "asked for"),
        (
            V2,
            V2,
            {"compression": Compression.NONE},
            "store",
            "timestamps and expiry; as stores do not write uncompressed",
        ),
        (
            V1TTL,
            V2,
            {"compression": Compression.NONE},
            "store",
            "keep their expiry; as stores do not write uncompressed",
        ),
        (V1, V2, {"compression": Compression.NONE}, "scan", "no timestamp or expiry to keep"),
        (V1, V2, {"engine": "store"}, "store", "asked for"),
        (V2, V1TTL, {}, "store", "keep their expiry"),
        (V2, V1TTL, {"assume_no_ttl": True}, "scan", "no key is taken to expire"),
        (V2, V1, {}, "store", "known without asking"),
        (V1TTL, V1, {}, "store", "known without asking"),
        (V1TTL, V1, {"assume_no_ttl": True}, "scan", "no key is taken to expire"),
        (V1, V1, {"file_kind": PARQUET}, "scan", "no timestamp or expiry to keep"),
        (V2, V2, {"file_kind": PARQUET}, "store", "timestamps and expiry; as stores do not write Parquet"),
        (V2, V2, {"file_kind": PARQUET, "compression": Compression.NONE}, "store", "timestamps"),
    ],
)
def test_auto_takes_the_stores_where_something_would_be_lost(
    source: ApiVersion, target: ApiVersion, changes: dict[str, Any], name: str, reason: str
) -> None:
    """The rule depends on the API versions and the flags alone, and a flag beats the rule."""
    engine = choose_engine(options(**changes), source, target)
    assert engine.name == name
    assert reason in engine.reason


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
def test_what_stores_do_not_write_is_rewritten(
    source: ApiVersion, target: ApiVersion, changes: dict[str, Any], rewrites: bool
) -> None:
    """Where bytes of the stores' files pass through here, the reason says so, and Spark does it."""
    engine = choose_engine(options(engine="store", **changes), source, target)
    assert (engine.name, engine.rewrites, "rewritten" in engine.reason) == ("store", rewrites, rewrites)
    assert engine.steers is not rewrites
    assert engine.executor == ("spark" if rewrites else "driver")


@pytest.mark.parametrize(
    ("changes", "executor"),
    [
        ({"engine": "store"}, "driver"),
        ({"engine": "scan"}, "spark"),
        ({"engine": "store", "executor": "spark"}, "spark"),
        ({"engine": "scan", "executor": "driver"}, "driver"),
    ],
)
def test_steering_needs_no_jvm(changes: dict[str, Any], executor: str) -> None:
    """Spark for bytes that pass through here, threads for the rest, unless said otherwise."""
    assert choose_engine(options(**changes), V1, V1).executor == executor


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
    ],
)
def test_a_rate_limit_is_divided_among_processes(
    executor: str, master: str, concurrency: int | None, tasks: int, share: int
) -> None:
    """One process on the driver, else as many as tasks run at once: together they never take more than the limit."""
    engine = choose_engine(options(executor=executor, spark_master=master, concurrency=concurrency), V1, V1)
    assert engine.share_of(1000, tasks) == share
    assert engine.share_of(0, tasks) == 0
