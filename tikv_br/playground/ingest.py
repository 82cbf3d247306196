"""Download and Ingest of SSTs: fetch, check, cut and rewrite a file, then ingest it with the checks of a real store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rocksdict import SstFileWriter

from tikv_br.cluster.pb import errorpb_pb2, import_sstpb_pb2, kvrpcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import DATA_PREFIX
from tikv_br.playground import external_storage, region_errors, sst_file
from tikv_br.playground.backup_files import sst_options
from tikv_br.playground.encoding import Row
from tikv_br.playground.engine import DEFAULT, WRITE
from tikv_br.playground.external_storage import CipherFault, StorageFault, open_for
from tikv_br.playground.node import INGEST_WITHOUT_PEER_FILE, StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import check_region
from tikv_br.playground.rewrite import RangeRewrite, RewriteFault
from tikv_br.playground.sst_file import COLUMN_FAMILIES, BadMeta, SstInspection, SstStore, UnreadableSst
from tikv_br.playground.txn.mvcc import decode_record


class DownloadFault(Exception):
    """The download failed; the message goes into the response."""


class StorePanics(Exception):
    """This request would crash a real store."""


def download(node: StoreNode, request: import_sstpb_pb2.DownloadRequest) -> import_sstpb_pb2.Range | None:
    """Download, check and rewrite a file; returns the outermost keys kept (without ``z``), None if there are none.

    A file that the store has already is not fetched again. Raises `BadMeta`, `DownloadFault` and `StorePanics`.
    """
    meta = request.sst
    saved, temp = node.files.path(meta), node.files.temp_path(meta)
    try:
        if saved.exists():
            return _range(node.files.facts(saved), meta)
        is_plain = request.request_type == import_sstpb_pb2.Keyspace and node.release.rewrites_plain_keys
        rewrite = RangeRewrite.of(request.rewrite_rule, meta, is_plain=is_plain)
        temp.write_bytes(_fetch(node, request, temp))
        return _keep(node.files, temp, saved, rewrite, meta)
    except StorageFault as fault:
        raise DownloadFault(fault.display) from fault
    except UnreadableSst as error:
        state = f'Status {{ code: IoError, sub_code: None, sev: NoError, state: "{error}" }}'
        raise DownloadFault(f"Engine Engine({state})") from error
    except RewriteFault as error:
        raise DownloadFault(str(error)) from error
    finally:
        temp.unlink(missing_ok=True)


def _fetch(node: StoreNode, request: import_sstpb_pb2.DownloadRequest, temp: Path) -> bytes:
    """The plain bytes of the file, which must have the length in its meta."""
    storage = open_for(node, request.storage_backend)
    source = f"Cannot read {storage.url}/{request.name} into {temp}"
    try:
        data = storage.read(request.name)
    except StorageFault as fault:
        raise DownloadFault(f"{source}: {fault.display}") from fault
    node.downloads[request.name] += 1
    node.pace.work(request.sst.total_bytes)
    node.download_limit.work(len(data))
    if request.sst.length and len(data) != request.sst.length:
        raise DownloadFault(f"{source}: downloaded size {len(data)}, expected {request.sst.length}")
    try:
        return external_storage.crypt(request.cipher_info, request.sst.cipher_iv, data)
    except CipherFault as fault:
        raise DownloadFault(str(fault)) from fault


def _keep(
    files: SstStore, temp: Path, saved: Path, rewrite: RangeRewrite, meta: import_sstpb_pb2.SSTMeta
) -> import_sstpb_pb2.Range | None:
    """Save the file: unchanged if all of it is kept, else rewritten."""
    facts = files.facts(temp)
    if not facts.entries:  # the ingest will fail; the download does not
        temp.rename(saved)
        return _range(facts, meta)
    if not facts.first.startswith(DATA_PREFIX):
        raise StorePanics(f"invalid data key {facts.first.hex()}")
    first, last = facts.first[1:], facts.last[1:]
    if not rewrite.changes_keys and rewrite.keeps(first) and rewrite.keeps(last):
        temp.rename(saved)
        return _range(facts, meta)
    with sst_file.open_sst(temp) as db:
        rows = _rewritten(sst_file.rows_of(db), rewrite)
        if meta.cf_name == WRITE and rewrite.new_timestamp:
            rows = ((key, _restamped(record, rewrite.new_timestamp)) for key, record in rows)
        if not _write(rows, saved):
            return None
    return _range(files.facts(saved), meta)


def _rewritten(rows: Iterator[Row], rewrite: RangeRewrite) -> Iterator[Row]:
    for key, value in rows:
        if rewrite.is_past(key[1:]):
            return
        if rewrite.keeps(key[1:]):
            yield DATA_PREFIX + rewrite.apply(key[1:]), value


def _restamped(stored: bytes, ts: int) -> bytes:
    """A commit record whose transaction has started at ``ts``, as its value's key says after the rewrite."""
    return replace(decode_record(stored), start_ts=ts).encode()


def _write(rows: Iterator[Row], path: Path) -> bool:
    """Write an SST; False, and no file, when there are no rows."""
    row = next(rows, None)
    if row is None:
        return False
    writer = SstFileWriter(sst_options())
    partial = path.with_suffix(".part")
    with sst_file.rocksdb_errors(partial, path):
        writer.open(str(partial))
        while row is not None:
            writer[row[0]] = row[1]
            row = next(rows, None)
        writer.finish()
    partial.rename(path)
    return True


def _range(facts: SstInspection, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range:
    if not facts.entries:  # RocksDB does not open it here, though TiKV would have read it
        return import_sstpb_pb2.Range(start=meta.range.start, end=meta.range.start)
    return import_sstpb_pb2.Range(start=facts.first[1:], end=facts.last[1:])


_TXN_RANGES = ((b"m", b"n"), (b"t", b"u"))
"""The data of TiDB: the same in every API version."""


class IngestFault(Exception):
    """The store refuses the ingest with this error."""

    def __init__(self, error: errorpb_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


def is_incompatible(meta: import_sstpb_pb2.SSTMeta, mine: ApiVersion) -> bool:
    """Return whether a store of the version ``mine`` refuses a file for the API version in its meta."""
    if meta.api_version == mine.value or (mine is ApiVersion.V1TTL and meta.api_version == ApiVersion.V1.value):
        return False
    start, end = meta.range.start, meta.range.end
    return not any(low <= start and end < high for low, high in _TXN_RANGES)


class Ingestor:
    """Ingests on behalf of one store. ``nodes`` are all stores by id."""

    def __init__(self, node: StoreNode, nodes: Mapping[int, StoreNode]) -> None:
        self._node = node
        self._nodes = nodes

    def ingest(self, rpc: str, sent: kvrpcpb_pb2.Context, metas: Sequence[import_sstpb_pb2.SSTMeta]) -> None:
        """Ingest all files or none, on the leader for all replicas, and remove them.

        Raises `IngestFault`, and `StorePanics` or `UnreadableSst` if a real store would crash.
        """
        region = self._check(sent, metas)
        for meta in metas:
            _check_meta(meta, region)
        paths = [self._node.files.path(meta) for meta in metas]
        for path in paths:
            facts = self._node.files.facts(path)
            if facts.deadly:
                raise StorePanics(f"{path.name}: {facts.deadly}")
        for meta in metas:
            self._check_followers(rpc, region, meta)
        size = sum(path.stat().st_size for path in paths)
        with sst_file.rocksdb_errors(paths[0], paths[0]):
            for family in (DEFAULT, WRITE):  # a commit record is never without its value
                chosen = [path for path, meta in zip(paths, metas, strict=True) if (meta.cf_name or DEFAULT) == family]
                if chosen:
                    self._node.engine.ingest(chosen, family)
        self._node.sizes.written(region.id, size)
        for peer in region.peers:
            for meta in metas:
                self._nodes[peer.store_id].files.path(meta).unlink(missing_ok=True)

    def _check(self, sent: kvrpcpb_pb2.Context, metas: Sequence[import_sstpb_pb2.SSTMeta]) -> Region:
        """The checks before the command is sent to the region's peers: first the region, then the files."""
        error = check_region(self._node.regions, sent, self._node.store_id, read=True)
        region = self._node.regions.get(sent.region_id)
        if error is None and region is None:  # merged between the two calls
            error = region_errors.region_not_found(sent.region_id, read=True)
        if error is not None or region is None:
            raise IngestFault(error or errorpb_pb2.Error())
        for meta in metas:
            if not self._has_file(meta):
                raise IngestFault(
                    errorpb_pb2.Error(
                        message="The file which would be ingested doest not exist.",
                        stale_command=errorpb_pb2.StaleCommand(),
                    )
                )
        if not metas:
            message = f"[region {region.id}] ingest failed: Error(Kv(Error(EmptyRequest)))"
            raise IngestFault(errorpb_pb2.Error(message=message))
        return region

    def _has_file(self, meta: import_sstpb_pb2.SSTMeta) -> bool:
        try:
            return self._node.files.path(meta).exists()
        except BadMeta:
            return False

    def _check_followers(self, rpc: str, region: Region, meta: import_sstpb_pb2.SSTMeta) -> None:
        """The leader's answer does not show it, but a follower without the file crashes when it applies the ingest."""
        for peer in region.peers:
            if not self._nodes[peer.store_id].files.path(meta).exists():
                what = f"{INGEST_WITHOUT_PEER_FILE}: region {region.id}, uuid {meta.uuid.hex()}"
                self._node.fatal_requests.record(store_id=peer.store_id, rpc=rpc, what=what)


def _check_meta(meta: import_sstpb_pb2.SSTMeta, region: Region) -> None:
    """Check, as peers do when they apply the command, that the file is for this region and epoch, with conf_ver."""
    epoch = meta.region_epoch
    if (meta.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
        message = f"[region {region.id}] ingest failed: invalid cf name {meta.cf_name}"
        raise IngestFault(errorpb_pb2.Error(message=message))
    if meta.region_id != region.id:
        raise IngestFault(region_errors.region_not_found(meta.region_id, read=False))
    if (epoch.conf_ver, epoch.version) != (region.conf_ver, region.version):
        raise IngestFault(region_errors.epoch_not_match(region, epoch, [region]))
    for key in (meta.range.start, meta.range.end):
        if not region.contains(key):
            raise IngestFault(region_errors.key_not_in_region(region, key))
