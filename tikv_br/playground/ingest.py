"""One Ingest: the checks of a real store in their order, then RocksDB's own ingest of the files that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from formats.api_version import ApiVersion
from tikv_br.cluster.pb import errorpb_pb2, import_sstpb_pb2, kvrpcpb_pb2
from tikv_br.playground import crimes, region_errors, sst_file
from tikv_br.playground.download import StorePanics
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.sst_store import COLUMN_FAMILIES, BadMeta, SstStore

_TXN_RANGES = ((b"m", b"n"), (b"t", b"u"))
"""Where the data of TiDB lie: the same in every API version."""


class IngestFault(Exception):
    """The store does not ingest; it answers with the error and lives on."""

    def __init__(self, error: errorpb_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


def incompatible(meta: import_sstpb_pb2.SSTMeta, mine: ApiVersion) -> bool:
    """Whether a store of the version ``mine`` refuses a file for the API version that its meta names."""
    if meta.api_version == mine.value or (mine is ApiVersion.V1TTL and meta.api_version == ApiVersion.V1.value):
        return False
    start, end = meta.range.start, meta.range.end
    return not any(low <= start and end < high for low, high in _TXN_RANGES)


class Ingestor:
    """Ingests on behalf of one store. ``stores`` are the waiting files of every store, by store id."""

    def __init__(self, node: StoreNode, stores: Mapping[int, SstStore]) -> None:
        self._node = node
        self._stores = stores
        self._files = stores[node.store_id]

    def ingest(self, rpc: str, asked: kvrpcpb_pb2.Context, metas: Sequence[import_sstpb_pb2.SSTMeta]) -> None:
        """Ingest all files or none, on the leader for all replicas; they wait no longer afterwards.

        Raises `IngestFault`, and `StorePanics` or `UnreadableSst` where a real store dies.
        """
        region = self._check(asked, metas)
        for meta in metas:
            _check_meta(meta, region)
        paths = [self._files.saved(meta) for meta in metas]
        for path in paths:
            facts = self._files.facts(path)
            if facts.deadly:
                raise StorePanics(f"{path.name}: {facts.deadly}")
        for meta in metas:
            self._accuse_followers(rpc, region, meta)
        size = sum(path.stat().st_size for path in paths)
        with sst_file.rocksdb_errors(paths[0], paths[0]):
            self._node.engine.ingest(paths)
        self._node.sizes.written(region.id, size)
        for peer in region.peers:
            for meta in metas:
                self._stores[peer.store_id].remove(meta)

    def _check(self, asked: kvrpcpb_pb2.Context, metas: Sequence[import_sstpb_pb2.SSTMeta]) -> Region:
        """What is checked before the command goes to the region's peers: place and time, then the files."""
        error = self._node.regions.check(asked, self._node.store_id, read=True)
        region = self._node.regions.get(asked.region_id)
        if error is None and region is None:  # it went between the two calls
            error = region_errors.region_not_found(asked.region_id, read=True)
        if error is not None or region is None:
            raise IngestFault(error or errorpb_pb2.Error())
        for meta in metas:
            if not self._waits(meta):
                raise IngestFault(
                    errorpb_pb2.Error(
                        message="The file which would be ingested doest not exist.",
                        stale_command=errorpb_pb2.StaleCommand(),
                    )
                )
        if not metas:
            said = f"[region {region.id}] ingest failed: Error(Kv(Error(EmptyRequest)))"
            raise IngestFault(errorpb_pb2.Error(message=said))
        return region

    def _waits(self, meta: import_sstpb_pb2.SSTMeta) -> bool:
        try:
            return self._files.has(meta)
        except BadMeta:
            return False

    def _accuse_followers(self, rpc: str, region: Region, meta: import_sstpb_pb2.SSTMeta) -> None:
        """The leader's answer does not show it, but a follower without the file dies when it comes to ingest it."""
        for peer in region.peers:
            if not self._stores[peer.store_id].has(meta):
                what = f"{crimes.INGEST_WITHOUT_PEER_FILE}: region {region.id}, uuid {meta.uuid.hex()}"
                self._node.crimes.record(store_id=peer.store_id, rpc=rpc, what=what)


def _check_meta(meta: import_sstpb_pb2.SSTMeta, region: Region) -> None:
    """What the peers check when they apply the command: the region as it was for the file, to the conf_ver."""
    epoch = meta.region_epoch
    if (meta.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
        said = f"[region {region.id}] ingest failed: invalid cf name {meta.cf_name}"
        raise IngestFault(errorpb_pb2.Error(message=said))
    if meta.region_id != region.id:
        raise IngestFault(region_errors.region_not_found(meta.region_id, read=False))
    if (epoch.conf_ver, epoch.version) != (region.conf_ver, region.version):
        raise IngestFault(region_errors.epoch_not_match(region, epoch, [region]))
    for key in (meta.range.start, meta.range.end):
        if not region.contains(key):
            raise IngestFault(region_errors.key_not_in_region(region, key))
