"""Drills with what a backup can be otherwise: in S3, encrypted, of several keyspaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.drill.conftest import assert_nothing_left
from tests.integration.s3_servers import S3Server, moto_server
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tikv_br.drill.history import read_past_drills
from tikv_br.drill.ledger import read_ledgers
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.run import drill
from tikv_br.drill.targets import ClusterTarget
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.report.facts import DrillVerdict
from tikv_br.storage.crypter import Crypter, SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import CloudFlags, StorageLocation, parse

ROWS = {b"row%03d" % number: b"value" * 10 for number in range(200)}
OTHERS = {b"other%03d" % number: b"" for number in range(50)}
OTHER, SCRATCH = 5, 7


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster with rows in two keyspaces."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1) as live:
        live.raw().batch_put(ROWS)
        live.raw(OTHER).batch_put(OTHERS)
        yield live


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """Run an S3 server."""
    with moto_server() as server:
        yield server


@pytest.fixture
def options(options: DrillOptions) -> DrillOptions:
    """A drill that backs up all that is there by now, and restores it into a playground."""
    assert options.backup is not None
    return replace(options, backup=structs.replace(options.backup, safe_interval=0.0))


def test_encrypted_backups_and_reports_in_s3_are_rehearsed(
    options: DrillOptions, source: LiveCluster, s3: S3Server
) -> None:
    """Into a keyspace of the source, with a damaged copy as well; of ledger, copies and states nothing stays in the bucket."""
    crypter = Crypter.of("aes256-ctr", SecretText("0123456789abcdef" * 4))

    def locate(url: str) -> StorageLocation:
        return replace(parse(url, CloudFlags(s3.location().s3)), crypter=crypter)

    assert options.backup is not None
    backups = locate("s3://backups/all")
    asked = replace(
        options,
        backups=backups,
        home=locate("s3://backups/drills"),
        backup=structs.replace(options.backup, storage=backups),
        target=ClusterTarget(source.config, str(SCRATCH)),
    )
    found = drill(asked)
    assert (found.verdict, found.value("keys")) == (DrillVerdict.PASSED, len(ROWS))
    damaged = drill(replace(asked, backup=None, scenario=Scenario.CORRUPT_BACKUP))
    assert damaged.verdict is DrillVerdict.PASSED
    home = open_store(asked.home)
    assert [past.id for past in read_past_drills(home)] == [found.id, damaged.id]
    assert read_ledgers(home) == []
    assert contents(source, SCRATCH) == {}
    names = {each["Key"] for each in s3.admin.list_objects_v2(Bucket="backups", Prefix="drills/")["Contents"]}
    assert {name.split("/")[1] for name in names} == {"reports", "index.html"}
    page = s3.admin.get_object(Bucket="backups", Key=f"drills/reports/{found.id}.html")["Body"].read()
    assert b"Recovery drill" in page


def test_several_keyspaces_are_rehearsed_together(options: DrillOptions, source: LiveCluster) -> None:
    """Each to its own keyspace; one keyspace for both is refused."""
    assert options.backup is not None
    asked = replace(options, backup=structs.replace(options.backup, keyspaces=("0", str(OTHER))))
    found = drill(asked)
    assert (found.verdict, found.value("keys")) == (DrillVerdict.PASSED, len(ROWS) + len(OTHERS))
    assert_nothing_left(asked)
    newest = replace(asked, backup=None)
    with pytest.raises(UsageError, match="cannot all go to one"):
        drill(replace(newest, target=ClusterTarget(source.config, str(SCRATCH))))
    assert (contents(source), contents(source, OTHER)) == (ROWS, OTHERS)
