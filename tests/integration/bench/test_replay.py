"""The replay server answers as a cluster does: to our client and to client-go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from bench.dataset import Dataset
from bench.replay import replaying
from bench.rivals import per_key_python, rocksdict_writer
from bench.scan_to_sst import scan_task
from tests.interop.line_client import LineClient
from tests.support.tools import find_tool
from tikv_br.cluster.cluster import Cluster, ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.formats.rows import from_storage
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.source import MemorySource

DATASET = Dataset(25_000, 30)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the address of a server with several regions."""
    with replaying(DATASET, regions=7) as address:
        yield address


def test_a_scan_finds_every_row(server: str) -> None:
    """Our scan goes through all regions and finds the rows of the dataset, each once."""
    with Cluster.connect(ClusterConfig(pd=(server,))) as cluster:
        raw = RawClient(cluster.router, KeyCodec(ApiVersion.V1), cluster.cluster_id)
        pages = list(raw.scan_pages(EVERY_KEY, page_rows=1000))
    records = DATASET.records()
    assert pa.concat_arrays([page.keys for page in pages]).equals(records["key"])
    assert pa.concat_arrays([page.values for page in pages]).equals(records["value"])


def test_client_go_scans_it(server: str) -> None:
    """Client-go, which sends batched commands, finds as many rows and bytes."""
    program = find_tool("client_go", hint="run scripts/install_client_go.sh", variable="CLIENT_GO")
    with LineClient([program, server, "v1"]) as client:
        loop = client.scan_loop(1000)
    assert (loop.rows, loop.bytes) == (DATASET.rows, DATASET.user_bytes)
    assert 0 < loop.cpu_seconds < 60


def test_rivals_write_the_same_rows(server: str, tmp_path: Path) -> None:
    """The scan engine's task and both rivals leave the same rows in the storage."""
    scan_task(server, str(tmp_path / "ours"), Compression.ZSTD)
    with Cluster.connect(ClusterConfig(pd=(server,))) as cluster:
        rocksdict_writer(cluster, str(tmp_path))
        by_rocksdict = stored(tmp_path / "data.sst")
        per_key_python(cluster, str(tmp_path))
    [ours] = (tmp_path / "ours").rglob("*.sst")
    assert stored(ours).equals(by_rocksdict)
    assert stored(tmp_path / "data.sst").equals(by_rocksdict)
    records = from_storage(by_rocksdict.combine_chunks().to_batches()[0], KeyCodec(ApiVersion.V2))
    assert records["key"].equals(DATASET.records()["key"])
    assert records["value"].equals(DATASET.records()["value"])


def test_runs_share_a_connection(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tasks of one process do: with a connection for each run, a bench would measure how gRPC connects."""
    connect, connected = Cluster.connect, []

    def counted(config: ClusterConfig) -> Cluster:
        connected.append(config)
        return connect(config)

    monkeypatch.setattr(Cluster, "connect", counted)
    with ClusterPool() as clusters:
        for run in range(3):
            scan_task(server, str(tmp_path / str(run)), Compression.ZSTD, clusters=clusters)
    assert len(connected) == 1


def stored(path: Path) -> pa.Table:
    """Return the rows of an SST."""
    return pa.Table.from_batches(SstReader(MemorySource(path.read_bytes())).batches())
