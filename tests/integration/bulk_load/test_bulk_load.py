"""Bulk loads of files that pyarrow and the standard library write, against what the target's own client reads."""

from __future__ import annotations

import contextlib
import csv
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs
from pyspark.sql import SparkSession

from tests.integration.restore.restores import forge_checkpoint
from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tikv_br.backupset import layout, manifest
from tikv_br.bulk_load import run, stage
from tikv_br.bulk_load.run import BulkLoadOptions, BulkLoadSummary, bulk_load
from tikv_br.bulk_load.stage import StageOptions
from tikv_br.errors import BackupPathInUse, ChecksumMismatch, TargetNotEmpty, TaskFailed, Terminated, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.progress_events import Notice
from tikv_br.restore.options import Mode
from tikv_br.storage.url import parse
from tikv_br.tasks.executor import ExecutorChoice
from tikv_br.tasks.inputs import Input
from tikv_br.tasks.settings import SparkSettings

ROWS = {f"user-{number * 7919 % 1000:04d}": f"wört {number}" * (number % 5) for number in range(1000)}
EXPECTED = {key.encode(): value.encode() for key, value in ROWS.items()}
MASTER = "local[2]"
KEYSPACE = 7


@dataclass(frozen=True)
class Starts:
    """Counter of sessions that loads request."""

    masters: list[str]


@pytest.fixture(autouse=True)
def starts(session: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Loads get the module's session instead of one of their own."""
    starts = Starts([])

    @contextlib.contextmanager
    def given(master: str, _settings: SparkSettings) -> Iterator[SparkSession]:
        starts.masters.append(master)
        yield session

    monkeypatch.setattr(stage, "sql_session", given)
    return starts


@pytest.fixture(scope="module", params=[ApiVersion.V1])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster for the tests with one API version."""
    with live_cluster(tmp_path_factory.mktemp("cluster"), request.param) as live:
        yield live


@pytest.fixture
def target(running: LiveCluster) -> LiveCluster:
    """An empty cluster."""
    running.raw().delete_range(EVERY_KEY)
    return running


Load = Callable[..., BulkLoadSummary]


@pytest.fixture(params=["auto", pytest.param("spark", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> ExecutorChoice:
    """Reader of the input: Spark, or this process if it can."""
    choice: ExecutorChoice = request.param
    return choice


@pytest.fixture
def options(target: LiveCluster, tmp_path: Path, executor: ExecutorChoice) -> Callable[..., BulkLoadOptions]:
    """Return a function that makes the options of a load: of `Input`, `StageOptions` and `BulkLoadOptions` by name."""

    def make(path: Path, **changes: Any) -> BulkLoadOptions:  # noqa: ANN401 - fields of three classes
        of_input = {name: changes.pop(name) for name in list(changes) if name in signature(Input).parameters}
        of_stage = {name: changes.pop(name) for name in list(changes) if name in signature(StageOptions).parameters}
        source = Input(str(path), **{"key_column": "id", "value_column": "payload", **of_input})
        return BulkLoadOptions(
            cluster=target.config,
            staging=parse(f"local://{tmp_path / 'staging'}"),
            stage=StageOptions(source, **of_stage),
            executor=executor,
            spark_master=MASTER,
            **changes,
        )

    return make


def parquet(folder: Path, **columns: object) -> Path:
    """A Parquet file with these columns."""
    path = folder / "table.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def staged(options: BulkLoadOptions) -> list[Path]:
    """The files that loads have left in the staging folder."""
    return [path for path in Path(options.location.path).parent.rglob("*") if path.is_file()]


def write_parquet(folder: Path) -> Path:
    """Two files in a folder, one of large strings."""
    place = folder / "rows"
    place.mkdir()
    items = list(ROWS.items())
    for number, (part, kind) in enumerate(((items[::2], pa.string()), (items[1::2], pa.string()))):
        keys, values = zip(*part, strict=True)
        pq.write_table(pa.table({"id": pa.array(keys, kind), "payload": values}), place / f"{number}.parquet")
    return place / "*.parquet"


def write_csv(folder: Path) -> Path:
    """With a header; empty values are quoted, which Spark reads as empty if null is written in another way."""
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["payload", "more", "id"])
        writer.writerows((value, "x", key) for key, value in ROWS.items())
    return folder / "rows.csv"


def write_jsonl(folder: Path) -> Path:
    """An object a line."""
    lines = (json.dumps({"id": key, "payload": value, "more": 1}) for key, value in ROWS.items())
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "rows.jsonl"


@pytest.mark.core("load")
@pytest.mark.parametrize("write", [write_parquet, write_csv, write_jsonl])
def test_each_format_is_loaded(
    target: LiveCluster,
    tmp_path: Path,
    options: Callable[..., BulkLoadOptions],
    write: Callable[[Path], Path],
) -> None:
    """The target has the rows of the input and no others; the counts are theirs, and the staging is gone."""
    wanted = options(write(tmp_path), partitions=3)
    done = bulk_load(wanted)
    assert contents(target) == EXPECTED
    size = sum(len(key) + len(value) for key, value in EXPECTED.items())
    assert (done.total_kvs, done.total_bytes, done.verified) == (len(EXPECTED), size, True)
    assert (done.input_rows, done.bad_rows, done.duplicate_rows, done.files) == (len(EXPECTED), 0, 0, 3)
    assert not staged(wanted)


@pytest.mark.parametrize("running", [ApiVersion.V1TTL], indirect=True)
def test_rows_expire_after_their_ttl(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """The store's own TTLs of two keys are the columns' seconds, less the time of the load; one without does not expire."""
    path = parquet(
        tmp_path, id=["a", "b", "c"], payload=[b"1", b"2", b"3"], seconds=pa.array([5000, 70000, None], pa.int32())
    )
    bulk_load(options(path, ttl_column="seconds"))
    assert contents(target) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    left = [target.raw().get_ttl(key) or 0 for key in (b"a", b"b", b"c")]
    assert left.pop() == 0
    assert 4500 < left[0] <= 5000
    assert 69500 < left[1] <= 70000


@pytest.mark.parametrize("running", [ApiVersion.V2], indirect=True)
def test_keyspace(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """Rows come into the keyspace that is named, above tombstones of the same keys; another one is as before."""
    make_keyspaces(target, KEYSPACE)
    raw = target.raw(KEYSPACE)
    raw.delete_range(EVERY_KEY)
    raw.put(b"user-0001", b"old")
    raw.delete(b"user-0001")
    target.raw().put(b"user-0001", b"of another keyspace")
    bulk_load(options(write_parquet(tmp_path), keyspace=str(KEYSPACE), partitions=2))
    assert contents(target, KEYSPACE) == EXPECTED
    assert contents(target) == {b"user-0001": b"of another keyspace"}
    raw.put(b"user-0001", b"newer")
    assert raw.get(b"user-0001") == b"newer"


NUMBERS = [-(2**63), -70000, -2, -1, 0, 1, 2, 255, 256, 2**40, 2**63 - 1]


def test_integers_sort_as_numbers(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """Eight bytes, big-endian, with the sign bit flipped: the order of keys is that of the numbers."""
    path = parquet(tmp_path, id=pa.array(NUMBERS, pa.int64()), payload=pa.array(range(len(NUMBERS)), pa.int16()))
    bulk_load(options(path, partitions=2))
    found = contents(target)
    assert [struct.unpack(">Q", key)[0] - 2**63 for key in sorted(found)] == NUMBERS
    assert [struct.unpack(">Q", found[key])[0] - 2**63 for key in sorted(found)] == list(range(len(NUMBERS)))


def test_nested_values_become_json(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """Struct, array and map; nulls inside are kept, and binary keys are as they are."""
    keys = [b"\xff\x00", b"\x00"]
    structs = [{"name": "ä", "tags": ["x", None]}, {"name": None, "tags": []}]
    path = parquet(tmp_path, id=keys, payload=structs)
    bulk_load(options(path))
    assert {key: json.loads(value) for key, value in contents(target).items()} == dict(zip(keys, structs, strict=True))


def test_avro_without_its_module(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """The error names the missing module of Spark, and how to get it."""
    path = parquet(tmp_path, id=[b"a"], payload=[{"name": "x"}])
    with pytest.raises(UsageError, match="the Avro data source is not loaded") as caught:
        bulk_load(options(path, value_encoding="avro"))
    assert "--spark-conf spark.jars.packages=org.apache.spark:spark-avro_2.13:" in caught.value.hint
    assert contents(target) == {}
    with pytest.raises(UsageError, match="--value-encoding avro: column 'payload' has type string"):
        bulk_load(options(parquet(tmp_path, id=[b"a"], payload=["x"]), value_encoding="avro"))


def test_duplicates_are_refused(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """The message has the count and examples; nothing is in the target, and nothing is staged."""
    wanted = options(parquet(tmp_path, id=["a", "b", "a", "a", "c"], payload=["1", "2", "3", "4", "5"]))
    with pytest.raises(UsageError, match=r"2 rows with a key that another row has, for example 61$"):
        bulk_load(wanted)
    assert contents(target) == {}
    assert not Path(wanted.location.path).exists()


def test_last_of_duplicates_is_loaded(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """The row with the largest number, not the one that stands last; null is the smallest."""
    keys, values, order = ["a", "b", "a", "a", "b"], ["1", "2", "3", "4", "5"], [9, None, 10, 2, -1]
    path = parquet(tmp_path, id=keys, payload=values, version=order)
    done = bulk_load(options(path, order_column="version"))
    assert contents(target) == {b"a": b"3", b"b": b"5"}
    assert (done.input_rows, done.duplicate_rows, done.total_kvs) == (5, 3, 2)


@pytest.mark.parametrize("running", [ApiVersion.V1TTL], indirect=True)
def test_of_equal_rows_the_longest_ttl_counts(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """Rows that differ in nothing but their TTL: what is loaded does not depend on the order in which Spark reads them."""
    path = parquet(tmp_path, id=["a"] * 3, payload=["v"] * 3, seconds=[100, 50_000, 7], version=[1] * 3)
    bulk_load(options(path, order_column="version", ttl_column="seconds"))
    assert (target.raw().get_ttl(b"a") or 0) > 40_000


BAD = {"id": ["a", None, "b", "", "c"], "payload": ["1", "2", None, "3", "4"]}


def test_bad_rows_are_refused(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """Counted by what is wrong; nothing is in the target."""
    wanted = options(parquet(tmp_path, **BAD))
    with pytest.raises(
        UsageError, match="3 rows that cannot be loaded: 1 with empty key, 1 with null key, 1 with null"
    ):
        bulk_load(wanted)
    assert contents(target) == {}
    assert not staged(wanted)


def test_rows_that_no_client_could_overwrite(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """A key or a row beyond the stores' limits for puts is a bad row, and the largest key below them can be put and deleted."""
    largest = b"b" * 8192
    rows = {"a": b"1", "k" * 8193: b"2", largest.decode(): b"3", "c": bytes(8 << 20)}
    with pytest.raises(UsageError, match="1 with key longer than stores accept, 1 with row larger than stores accept"):
        bulk_load(options(parquet(tmp_path, id=list(rows), payload=list(rows.values()))))
    for mode in (Mode.INGEST, Mode.PUT):
        (tmp_path / mode.value).mkdir()
        path = parquet(tmp_path / mode.value, id=["a", largest.decode()], payload=[b"1", b"3"])
        bulk_load(options(path, mode=mode))
        assert contents(target) == {b"a": b"1", largest: b"3"}
        target.raw().batch_delete([b"a", largest])
        assert contents(target) == {}


def test_bad_rows_are_collected(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """They are in the folder with all their columns, in addition to its files; the others are loaded."""
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    done = bulk_load(options(parquet(tmp_path, **BAD, n=range(5)), bad_rows=str(folder)))
    assert contents(target) == {b"a": b"1", b"c": b"4"}
    rows = [json.loads(line) for path in folder.rglob("*.json") for line in path.read_text().splitlines()]
    assert {row["n"]: row["_problem"] for row in rows} == {1: "null key", 2: "null value", 3: "empty key"}
    assert (done.bad_rows, done.input_rows, done.problems["null key"]) == (3, 5, 1)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("running", [ApiVersion.V1TTL], indirect=True)
def test_bad_ttls_are_refused(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """Zero, negative, and text that is no integer; null is no expiry."""
    path = parquet(tmp_path, id=list("abcdef"), payload=list("123456"), seconds=["0", "-1", None, "x", "7", " 7"])
    with pytest.raises(UsageError, match="4 rows that cannot be loaded: 4 with TTL is not a positive integer"):
        bulk_load(options(path, ttl_column="seconds"))
    assert contents(target) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_column": "no"}, "--key-column: the input has no column 'no'"),
        ({"value_column": "ID"}, "--value-column: the input has no column 'ID'"),
        ({"key_column": "real"}, "--key-column: column 'real' has type double, which has no mapping to bytes"),
        ({"key_column": "nested"}, "--key-column: column 'nested' has type struct"),
        ({"ttl_column": "id"}, "--ttl-column: the cluster of API v1 does not support TTLs"),
        ({"order_column": "nested"}, "--order-column: column 'nested' has type struct"),
        ({"keyspace": "7"}, "--keyspace: "),
        ({"path": "/no/such.parquet"}, "Spark cannot read /no/such.parquet as parquet: .*PATH_NOT_FOUND"),
        ({"format": "nonsense"}, "as nonsense: .*DATA_SOURCE_NOT_FOUND"),
        ({"path": "s3a://bucket/x.parquet"}, "Spark cannot read s3a://bucket/x.parquet as parquet: "),
    ],
)
def test_wrong_options_change_nothing(
    target: LiveCluster,
    tmp_path: Path,
    options: Callable[..., BulkLoadOptions],
    changes: dict[str, str],
    message: str,
) -> None:
    """Each has its message; the target has the row that it had, and nothing is staged."""
    target.raw().put(b"k", b"v")
    path = parquet(tmp_path, id=["a"], payload=["1"], real=[0.5], nested=[{"x": 1}])
    wanted = options(Path(changes.get("path", path)), **{k: v for k, v in changes.items() if k != "path"})
    if changes.get("path", "").startswith("s3a:"):
        source = replace(wanted.stage.input, path=changes["path"])
        wanted = structs.replace(wanted, stage=structs.replace(wanted.stage, input=source))
    with pytest.raises(UsageError, match=message):
        bulk_load(wanted)
    assert contents(target) == {b"k": b"v"}
    assert not staged(wanted)


def test_columns_of_csv_go_by_name(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """In each file, so that no value becomes a key; a file without one of the columns is refused by name."""
    (tmp_path / "a.csv").write_text("id,payload\nk1,v1\n")
    (tmp_path / "b.csv").write_text("payload,id\nv2,k2\n")
    wanted = options(tmp_path / "*.csv")
    bulk_load(wanted)
    assert contents(target) == {b"k1": b"v1", b"k2": b"v2"}
    target.raw().delete_range(EVERY_KEY)
    (tmp_path / "c.csv").write_text("id,more\nk3,v3\n")
    with pytest.raises(UsageError, match=r"--value-column: .*c\.csv has no column 'payload'"):
        bulk_load(wanted)
    assert contents(target) == {}
    assert not staged(wanted)


def test_damaged_file_is_refused(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """One that is only noticed when the rows are read is named."""
    path = write_parquet(tmp_path)
    damaged = path.with_name("1.parquet")
    data = damaged.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    damaged.write_bytes(bytes(len(data) - footer) + data[-footer:])
    wanted = options(path)
    with pytest.raises((UsageError, TaskFailed), match=r"1\.parquet"):
        bulk_load(wanted)
    assert contents(target) == {}
    assert not staged(wanted)


def test_empty_input_is_refused(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """A table without rows is more often a wrong path than a wish."""
    empty = pa.array([], pa.string())
    with pytest.raises(UsageError, match="no rows to load"):
        bulk_load(options(parquet(tmp_path, id=empty, payload=empty)))
    assert contents(target) == {}


def test_target_with_rows_is_refused(
    target: LiveCluster, tmp_path: Path, starts: Starts, options: Callable[..., BulkLoadOptions]
) -> None:
    """It is unchanged, whatever a checkpoint beside the staged rows says. With --allow-overwrite the staged rows are loaded without reading the input again; other keys stay."""
    before = {b"user-0500": b"old", b"user-0500x": b"other"}
    target.raw().batch_put(before)
    wanted = options(write_parquet(tmp_path))
    with pytest.raises(TargetNotEmpty, match='its first key there is "user-0500"'):
        bulk_load(wanted)
    forge_checkpoint(target, wanted.location)
    with pytest.raises(TargetNotEmpty, match='its first key there is "user-0500"'):
        bulk_load(wanted)
    assert contents(target) == before
    done = bulk_load(structs.replace(wanted, allow_overwrite=True))
    assert contents(target) == {**before, **EXPECTED}
    assert (done.verified, done.other_kvs) == (True, 1)
    assert (done.resumed_staging, done.input_rows) == (True, None)
    assert len(starts.masters) == (wanted.executor == "spark")


def test_rows_outside_of_the_input_s_range_do_not_matter(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """Only the range from the first to the last key must be empty."""
    target.raw().batch_put({b"a": b"1", b"z": b"2", b"user-0999\0": b"3"})
    bulk_load(options(write_parquet(tmp_path)))
    assert contents(target) == {b"a": b"1", b"z": b"2", b"user-0999\0": b"3", **EXPECTED}


def test_load_continues_after_staging(
    target: LiveCluster,
    tmp_path: Path,
    starts: Starts,
    options: Callable[..., BulkLoadOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ended between staging and restore, the same command restores what is staged; with --no-resume it stages again."""
    wanted = options(write_parquet(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(run, "restore", _terminate)
        for resume in (True, False):
            with pytest.raises(Terminated):
                bulk_load(structs.replace(wanted, resume=resume))
    sessions = len(starts.masters)
    assert sessions == (2 if wanted.executor == "spark" else 0)
    assert contents(target) == {}
    done = bulk_load(wanted)
    assert (done.resumed_staging, len(starts.masters)) == (True, sessions)
    assert contents(target) == EXPECTED
    assert not staged(wanted)


def _terminate(*_: object) -> None:
    raise Terminated("for the test")


def test_the_same_load_again_changes_nothing(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """A target that has exactly the rows is loaded; with one row more within their range it is not empty. No folder is left."""
    wanted = options(write_parquet(tmp_path))
    first = bulk_load(wanted)
    assert not Path(wanted.location.path).exists()
    again = bulk_load(wanted)
    assert (again.crc64xor, again.verified, again.resumed_files) == (first.crc64xor, True, again.files)
    assert not Path(wanted.location.path).exists()
    target.raw().put(b"user-0500x", b"of another client")
    with pytest.raises(TargetNotEmpty):
        bulk_load(wanted)


@pytest.mark.parametrize("running", [ApiVersion.V2], indirect=True)
@pytest.mark.parametrize("executor", ["driver"], indirect=True)
def test_staging_of_other_keyspaces_is_not_loaded(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """What somebody has put in place of the staging may change the rows of the keyspace of the load, no others."""
    path = write_parquet(tmp_path)
    first, second = (options(path, keyspace=str(each), keep_staging=True) for each in (KEYSPACE, KEYSPACE + 1))
    make_keyspaces(target, KEYSPACE + 1)
    for raw in (target.raw(KEYSPACE), target.raw(KEYSPACE + 1)):
        raw.delete_range(EVERY_KEY)
    bulk_load(first)
    target.raw(KEYSPACE).delete_range(EVERY_KEY)
    Path(first.location.path).rename(second.location.path)
    with pytest.raises(BackupPathInUse, match="not of this load"):
        bulk_load(second)
    assert contents(target, KEYSPACE) == contents(target, KEYSPACE + 1) == {}
    bulk_load(structs.replace(second, resume=False))
    assert contents(target, KEYSPACE + 1) == EXPECTED


def test_unfinished_staging_is_redone(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]
) -> None:
    """Remains of a killed run: its lock file, a file without a record, and no description."""
    wanted = options(write_parquet(tmp_path))
    place = Path(wanted.location.path)
    (place / "sst").mkdir(parents=True)
    (place / layout.LOCK).write_bytes(manifest.LOCK_TEXT)
    (place / "sst" / f"{'0' * 16}_{'1' * 16}_00000_default.sst").write_bytes(b"half")
    assert not bulk_load(wanted).resumed_staging
    assert contents(target) == EXPECTED
    assert not staged(wanted)


def test_dry_run_changes_nothing(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """It counts rows, duplicates and bad rows, shows the first keys, and does not even make the staging folder."""
    keys, values = [*"gfedcba", "a", None], [str(number) for number in range(9)]
    wanted = options(parquet(tmp_path, id=keys, payload=values), dry_run=True, partitions=3)
    done = bulk_load(wanted)
    assert (done.input_rows, done.total_kvs, done.total_bytes) == (9, 7, 14)
    assert (done.duplicate_rows, done.duplicate_keys, done.bad_rows) == (1, [b"a".hex()], 1)
    assert done.sample_keys == [key.encode().hex() for key in "abcde"]
    assert contents(target) == {}
    assert not Path(wanted.location.path).parent.exists()


def test_kept_staging_is_a_backup(target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions]) -> None:
    """The same command again finds all rows in the target, and does nothing."""
    wanted = options(write_parquet(tmp_path), keep_staging=True)
    first, again = bulk_load(wanted), bulk_load(wanted)
    assert (again.resumed_staging, again.crc64xor) == (True, first.crc64xor)
    assert any(path.name == layout.META for path in staged(wanted))
    assert contents(target) == EXPECTED


def test_relative_paths_of_two_folders_are_two_inputs(
    target: LiveCluster, tmp_path: Path, options: Callable[..., BulkLoadOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A staging that a load of one folder's file has left is not taken for that of another one."""
    wanted = options(Path("rows.parquet"))
    places = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        places.append(wanted.location.path)
    assert places[0] != places[1]
    monkeypatch.chdir(tmp_path / "one")
    assert wanted.location.path == places[0]


@pytest.fixture
def put_options(options: Callable[..., BulkLoadOptions]) -> Callable[..., BulkLoadOptions]:
    """As `options`, of a load by puts."""
    return lambda path, **changes: structs.replace(options(path, **changes), mode=Mode.PUT, staging=None)


@pytest.mark.parametrize("running", [ApiVersion.V2], indirect=True)
def test_put(target: LiveCluster, tmp_path: Path, put_options: Callable[..., BulkLoadOptions]) -> None:
    """The keyspace has the rows of the input, put at no more than the rate, and no store has ingested a file."""
    rate = 20_000
    target.raw(KEYSPACE).delete_range(EVERY_KEY)
    ingests = target.fail("Ingest", {"delay": {"seconds": 0}}, count=-1)
    target.raw().put(b"user-0001", b"of another keyspace")
    done = bulk_load(put_options(write_parquet(tmp_path), keyspace=str(KEYSPACE), partitions=2, rate_limit=rate))
    assert target.hits(ingests) == 0
    target.relent(ingests)
    assert contents(target, KEYSPACE) == EXPECTED
    assert contents(target) == {b"user-0001": b"of another keyspace"}
    assert (done.engine, done.total_kvs, done.input_rows, done.verified) == ("put", len(EXPECTED), len(EXPECTED), True)
    assert done.crc64xor == target.raw(KEYSPACE).checksum().crc64xor
    size = sum(len(key) + len(value) for key, value in EXPECTED.items())
    assert done.step_seconds["put"] > size / rate


@pytest.mark.parametrize("running", [ApiVersion.V1TTL], indirect=True)
def test_put_with_ttls(target: LiveCluster, tmp_path: Path, put_options: Callable[..., BulkLoadOptions]) -> None:
    """The store's own TTLs; a row that expires at once leaves nothing to compare, which is said."""
    path = parquet(tmp_path, id=["a", "b"], payload=["1", "2"], seconds=[5000, 70000])
    assert bulk_load(put_options(path, ttl_column="seconds")).verified
    left = [target.raw().get_ttl(key) or 0 for key in (b"a", b"b")]
    assert 4500 < left[0] <= 5000
    assert 69500 < left[1] <= 70000
    path = parquet(tmp_path, id=["c", "d"], payload=["1", "2"], seconds=[1, 70000])
    notices: list[str] = []
    done = bulk_load(
        put_options(path, ttl_column="seconds"),
        lambda event: notices.append(event.message) if isinstance(event, Notice) else None,
    )
    assert not done.verified
    assert "not compared, because some of them have expired: 2 rows" in notices
    assert target.raw().get(b"d") == b"2"


def test_put_refuses_what_an_ingest_refuses(
    target: LiveCluster, tmp_path: Path, put_options: Callable[..., BulkLoadOptions]
) -> None:
    """Duplicates, bad rows, no rows: nothing is in the target."""
    repeated = parquet(tmp_path, id=["a", "b", "a"], payload=["1", "2", "3"])
    with pytest.raises(UsageError, match="1 row with a key that another row has"):
        bulk_load(put_options(repeated))
    with pytest.raises(UsageError, match="3 rows that cannot be loaded"):
        bulk_load(put_options(parquet(tmp_path, **BAD)))
    assert contents(target) == {}


def test_interrupted_puts_are_completed(
    target: LiveCluster, tmp_path: Path, put_options: Callable[..., BulkLoadOptions]
) -> None:
    """A target with half of the rows is refused, and completed with --allow-overwrite; a foreign key is reported."""
    half = dict(list(EXPECTED.items())[::2])
    target.raw().batch_put(half)
    wanted = put_options(write_parquet(tmp_path))
    with pytest.raises(TargetNotEmpty) as refused:
        bulk_load(wanted)
    assert "--allow-overwrite" in refused.value.hint
    assert f'its first key there is "{min(half).decode()}"' in refused.value.message
    assert contents(target) == half
    assert bulk_load(structs.replace(wanted, allow_overwrite=True)).verified
    assert contents(target) == EXPECTED
    target.raw().put(b"user-0500x", b"of another client")
    with pytest.raises(ChecksumMismatch, match=r"the target has .* rows in \[.*expected are"):
        bulk_load(structs.replace(wanted, allow_overwrite=True))
    assert not bulk_load(structs.replace(wanted, allow_overwrite=True, checksum=False)).verified
