"""Backups in Azure Blob Storage and Google Cloud Storage as a user makes and restores them: stores write and read the files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.integration.cloud_servers import ACCOUNT, ACCOUNT_KEY, CONTAINER, AzureServer, azurite_server
from tests.integration.gcs_server import GcsServer, gcs_server
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.ports import reserved_ports
from tikv_br.formats.api_version import ApiVersion

ROWS = {b"k%03d" % at: b"value %d" % at for at in range(200)}
WRONG_KEY = "d3Jvbmcga2V5"


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzureServer]:
    """The storage."""
    with azurite_server() as server:
        yield server


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """The other storage."""
    with gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Source of backups and target of restores."""
    with live_cluster(tmp_path_factory.mktemp("cluster"), ApiVersion.V2, stores=1) as live:
        yield live


def flags(azurite: AzureServer, container: str = CONTAINER, key: str = ACCOUNT_KEY) -> list[str]:
    """The storage, with the Go tool's flags."""
    access = ["--azblob.endpoint", azurite.endpoint, "--azblob.account-name", ACCOUNT, "--azblob.account-key", key]
    return ["--storage", f"azblob://{container}/backup", *access]


def test_stores_write_and_read_the_files(azurite: AzureServer, cluster: LiveCluster) -> None:
    """Stores write SSTs to the container and download them from it, with credentials that nothing shows."""
    raw = cluster.raw()
    raw.batch_put(ROWS)
    common = ["--pd", cluster.pd, *flags(azurite), "--azblob.access-tier", "Cool", "--output", "json"]
    made = succeed("backup", "raw", *common, "--engine", "store")
    assert made.last["engine"] == "store"
    _headers, listing = azurite.request("GET", CONTAINER, "restype=container&comp=list&prefix=backup/")
    assert b".sst</Name>" in listing
    raw.batch_delete(list(ROWS))
    assert contents(cluster) == {}
    restored = succeed("restore", "raw", *common, "--via", "stores", "--restamp", "always")
    assert contents(cluster) == ROWS
    assert ACCOUNT_KEY not in made.out + made.err + restored.out + restored.err


def test_stores_use_a_key_file_of_google(gcs: GcsServer, cluster: LiveCluster) -> None:
    """Stores are sent the key file, write SSTs to the bucket and download them from it."""
    raw = cluster.raw()
    raw.batch_put(ROWS)
    access = ["--gcs.endpoint", f"{gcs.endpoint}/storage/v1/", "--gcs.credentials-file", str(gcs.credentials)]
    common = ["--pd", cluster.pd, "--storage", "gs://backups/backup", *access, "--output", "json"]
    assert succeed("backup", "raw", *common, "--engine", "store").last["engine"] == "store"
    assert any(name.endswith(".sst") for name in gcs.stored("backup/"))
    raw.batch_delete(list(ROWS))
    succeed("restore", "raw", *common, "--via", "stores", "--restamp", "always")
    assert contents(cluster) == ROWS


@pytest.mark.parametrize(
    ("container", "key", "code", "sentence"),
    [
        (CONTAINER, WRONG_KEY, 21, "the account key or SAS token is wrong"),
        ("no-such-container", ACCOUNT_KEY, 24, "container 'no-such-container' does not exist"),
        ("Upper", ACCOUNT_KEY, 2, "starts with the name of a container"),
    ],
)
def test_refusals(
    azurite: AzureServer, cluster: LiveCluster, container: str, key: str, code: int, sentence: str
) -> None:
    """Wrong credentials and a missing container end a backup before it does anything, with their own exit codes."""
    done = tikv_br("backup", "raw", "--pd", cluster.pd, *flags(azurite, container, key))
    assert (done.code, sentence in done.out + done.err) == (code, True)
    assert key not in done.out + done.err


def test_nobody_answers(gcs: GcsServer) -> None:
    """A closed endpoint is reported within seconds, with its own exit code."""
    with reserved_ports(1) as [port]:
        nowhere = f"http://127.0.0.1:{port}"
        for url in (
            AzureServer(f"{nowhere}/{ACCOUNT}", None).url("backups"),
            gcs.url("backups", endpoint=nowhere),
        ):
            done = tikv_br("list", "-s", url)
            assert (done.code, "does not answer: connection refused" in done.err) == (20, True)


def test_a_bucket_that_is_missing(gcs: GcsServer, cluster: LiveCluster) -> None:
    """A missing bucket ends a backup before it does anything, also on Google's cloud."""
    done = tikv_br("backup", "raw", "--pd", cluster.pd, "-s", gcs.url("backup", "no-such-bucket"))
    assert (done.code, "bucket 'no-such-bucket' does not exist" in done.err) == (24, True)
