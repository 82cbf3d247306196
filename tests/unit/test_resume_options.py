"""A resumed run must share all options of the run that it resumes, but those whose field is declared otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, get_type_hints

import pytest
from msgspec import Struct, structs

from tikv_br.backup.merge import MergeOptions
from tikv_br.backupset.manifest import Description, RunRecord
from tikv_br.bulk_load.run import BulkLoadOptions
from tikv_br.bulk_load.stage import StageOptions
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.point_in_time import PointOptions
from tikv_br.restore.options import Restamp, RestoreOptions
from tikv_br.resume_options import (
    MayChange,
    chosen,
    chosen_differences,
    compared,
    compared_as,
    declarations,
    differences,
)
from tikv_br.storage.crypter import SecretText
from tikv_br.storage.url import AzureOptions, CloudFlags, GcsOptions, S3Options, StorageLocation
from tikv_br.tasks.inputs import Input

CLUSTER = ClusterConfig(pd=("127.0.0.1:2379",))
PLACE = StorageLocation("local", "/backups")
STAGE = StageOptions(Input("/rows.parquet", "key", "value"))


class Sample(Struct, frozen=True):
    """Options of an operation."""

    place: MayChange[str]
    engine: Annotated[str, compared_as("chosen_engine")] = "auto"
    level: int = 3
    key: bytes = b""
    losses: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (BackupOptions, {"compression_level"}),
        (MergeOptions, set()),
        (RestoreOptions, {"restamp"}),
        (BulkLoadOptions, set()),
        (StageOptions, {"clouds"}),
        (PointOptions, set()),
        (S3Options, {"endpoint", "region", "provider"}),
        (AzureOptions, {"endpoint", "account_name"}),
        (GcsOptions, {"endpoint"}),
    ],
)
def test_each_option_is_compared_or_declared(options: Any, names: set[str]) -> None:  # noqa: ANN401 - a class of options
    """A new option is compared: it must be added here, or declared at its field."""
    declared, types = set(declarations(options)), get_type_hints(options)
    assert set(types) - declared == names
    assert not {name for name, of in types.items() if of is SecretText} - declared


@pytest.mark.parametrize("options", [BackupOptions, MergeOptions])
def test_options_compared_by_the_record_of_the_run_are_in_it(options: Any) -> None:  # noqa: ANN401 - as above
    """The record has a field of that name, which a resumed run must share."""
    recorded = {
        name for kind in (Description, RunRecord) for name in set(kind.__struct_fields__) - set(declarations(kind))
    }
    checked = {"backup_ts", "its fields"}  # by find_resumable_merge; by themselves
    assert set(filter(None, declarations(options).values())) <= recorded | checked


@pytest.mark.parametrize(
    "changes",
    [
        {"input": replace(STAGE.input, order_column="at")},
        {"keyspace": "4"},
        {"bad_rows": "/bad"},
        {"clouds": CloudFlags(s3=S3Options(endpoint="http://127.0.0.1:9000"))},
        {"clouds": CloudFlags(azure=AzureOptions(account_name="lake"))},
    ],
)
def test_a_load_of_another_input_is_another_load(changes: dict[str, Any]) -> None:
    """Also of the same bucket and path at another server."""
    assert structs.replace(STAGE, **changes).identity(CLUSTER) != STAGE.identity(CLUSTER)


def test_a_load_with_other_credentials_is_the_same() -> None:
    """They are not part of the name of the staging folder, nor is the number of partitions."""
    secret = CloudFlags(s3=S3Options(secret_access_key=SecretText("word"), patience=5.0))
    assert structs.replace(STAGE, clouds=secret, partitions=7).identity(CLUSTER) == STAGE.identity(CLUSTER)


def test_the_name_of_a_load_is_that_of_older_versions() -> None:
    """So their unfinished loads are resumed."""
    assert STAGE.identity(CLUSTER) == "load-517c0c107d17788f"


def test_defaults_are_left_out() -> None:
    """A run that did not know an option can be resumed with its default."""
    assert chosen(Sample("here")) == ()
    assert chosen(Sample("here", "scan", 5, b"\xff", frozenset("ba"))) == ("key=ff", "level=5", "losses=a, b")
    assert chosen(RestoreOptions(CLUSTER, PLACE, restamp=Restamp.NEVER)) == ("restamp=never",)


def test_differences_name_the_option_and_both_values() -> None:
    """An option that was not given is at its default."""
    begun, wanted = chosen(Sample("here", level=5)), chosen(Sample("there", level=6, key=b"a=b"))
    assert chosen_differences(begun, wanted) == ["key was the default, is 613d62", "level was 5, is 6"]
    assert chosen_differences(wanted, ()) == ["key was 613d62, is the default", "level was 6, is the default"]
    assert chosen_differences(None, wanted) == []


def test_records_are_compared_by_value() -> None:
    """Two ranges that look alike in a message may differ."""
    first = {"ranges": (KeyRange(b"a", b"b"),), "engine": "scan"}
    assert differences(first, first | {"ranges": (), "engine": "scan"}) == ["ranges was [61, 62), is none"]
    assert compared(Sample("here", level=9)) == {"level": 9, "key": b"", "losses": frozenset()}
