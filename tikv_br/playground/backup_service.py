"""``backup.Backup`` of one store: it writes SSTs of the regions it leads to external storage, one file a region."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from formats.api_version import ApiVersion
from formats.keys import DATA_PREFIX, RAW_MODE, RAW_MODE_END, KeyCodec
from tikv_br.cluster.pb import brpb_pb2, brpb_pb2_grpc, errorpb_pb2, kvrpcpb_pb2
from tikv_br.playground import cipher, crimes
from tikv_br.playground.backup_writer import Conversion, Row, Written, sst_options, write_sst
from tikv_br.playground.cipher import CipherFault
from tikv_br.playground.external_storage import ExternalStorage, StorageFault
from tikv_br.playground.failpoints import BACKUP_REGION
from tikv_br.playground.faulty_storage import open_for
from tikv_br.playground.node import StoreNode
from tikv_br.playground.raw_faults import VERSION_NAMES
from tikv_br.playground.region import Region

RPC: Final = "Backup"
_DEFAULT_CF: Final = "default"
_COLUMN_FAMILIES: Final = frozenset({"", _DEFAULT_CF, "lock", "write", "raft"})


@dataclass(frozen=True, slots=True)
class _Piece:
    """A region and the part of it to back up, in RPC keys of the source."""

    region: Region
    start: bytes
    end: bytes


class BackupService(brpb_pb2_grpc.BackupServicer):
    """Serves one store."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._codec = KeyCodec(node.api_version)

    def add_to(self, server: grpc.Server) -> None:
        """Register the service."""
        brpb_pb2_grpc.add_BackupServicer_to_server(self, server)

    def backup(
        self, request: brpb_pb2.BackupRequest, context: grpc.ServicerContext
    ) -> Iterator[brpb_pb2.BackupResponse]:
        """One response a region; failures are responses too, and the others go on."""
        if request.cf not in _COLUMN_FAMILIES:
            context.abort(grpc.StatusCode.UNKNOWN, f'InvalidCf {{ cf: "{request.cf}" }}')
        if request.is_raw_kv and (refused := self._refused_version(request)):
            yield _failure(refused)
            return
        ranges = [(each.start_key, each.end_key) for each in request.sub_ranges]
        ranges = ranges or [(request.start_key, request.end_key)]
        self._answer_for_crimes(request, ranges, context)
        if request.is_raw_kv and self._node.api_version is ApiVersion.V2:
            self._node.causal.flush()  # even if what follows fails
        try:
            storage = open_for(self._node, request.storage_backend)
        except StorageFault as fault:
            yield _failure(fault.debug)
            return
        task = _Task(self._node, request, storage)
        for piece in [piece for start, end in ranges for piece in self._pieces(start, end)]:
            if not context.is_active():
                return
            error = self._region_error(piece.region, context)
            if error is not None:
                yield brpb_pb2.BackupResponse(error=brpb_pb2.Error(region_error=error))
            else:
                yield task.run(piece)

    def _refused_version(self, request: brpb_pb2.BackupRequest) -> str | None:
        """Why the store cannot write that API version, or (V2) has no raw data in such a range."""
        mine, wanted = self._node.api_version, request.dst_api_version
        known = wanted <= ApiVersion.V2.value
        start, end = request.start_key, request.end_key
        in_raw_mode = start.startswith(RAW_MODE) and (end.startswith(RAW_MODE) or end == RAW_MODE_END)
        if known and Conversion(mine, ApiVersion(wanted)).allowed and (in_raw_mode or mine is not ApiVersion.V2):
            return None
        said = f"invalid backup version, cur: {VERSION_NAMES[mine]}, dst: {VERSION_NAMES[wanted]}"
        return f'Other("[components/backup/src/endpoint.rs:1136]: {said}")'

    def _answer_for_crimes(
        self, request: brpb_pb2.BackupRequest, ranges: list[tuple[bytes, bytes]], context: grpc.ServicerContext
    ) -> None:
        for start, end in ranges:
            if start == end and start:
                what = f"{crimes.BACKUP_EMPTY_RANGE}: {start.hex()}"
                crimes.store_dies(self._node, context, RPC, what)
            if not request.is_raw_kv and self._node.api_version is not ApiVersion.V2 and self._holds_data(start, end):
                crimes.store_dies(self._node, context, RPC, crimes.BACKUP_NOT_RAW)

    def _holds_data(self, start: bytes, end: bytes) -> bool:
        rows = self._node.engine.iterate(DATA_PREFIX + start, DATA_PREFIX + end if end else b"")
        return next(rows, None) is not None

    def _pieces(self, start: bytes, end: bytes) -> Iterator[_Piece]:
        """The parts of [start, end) that this store leads now; none of a range that goes backwards."""
        if end and start > end:
            return
        for region in self._node.regions.overlapping(self._codec.bound(start), self._codec.bound(end)):
            if region.leader_store == self._node.store_id:
                region_start, region_end = map(self._codec.from_bound, (region.start, region.end))
                yield _Piece(region, max(start, region_start), min(filter(None, (end, region_end)), default=b""))

    def _region_error(self, region: Region, context: grpc.ServicerContext) -> errorpb_pb2.Error | None:
        """What has become of a region since the work was divided, or what a failpoint says so."""
        node = self._node
        error = node.failpoints.intercept(BACKUP_REGION, store_id=node.store_id, region_id=region.id, context=context)
        if error is not None:
            return error
        seen = region.to_pb()
        asked = kvrpcpb_pb2.Context(region_id=region.id, region_epoch=seen.region_epoch, peer=region.leader.to_pb())
        return node.regions.check(asked, node.store_id, read=True)


class _Task:
    """What one request asks for, region by region."""

    def __init__(self, node: StoreNode, request: brpb_pb2.BackupRequest, storage: ExternalStorage) -> None:
        self._node = node
        self._request = request
        self._storage = storage
        self._codec = KeyCodec(node.api_version)
        self._cf = request.cf or _DEFAULT_CF

    def run(self, piece: _Piece) -> brpb_pb2.BackupResponse:
        """Back up one piece; a failure of the storage is told with the range it leaves undone."""
        response = brpb_pb2.BackupResponse(
            start_key=piece.start, end_key=piece.end, api_version=self._request.dst_api_version
        )
        if self._request.is_raw_kv and self._cf == _DEFAULT_CF:
            try:
                response.files.extend(self._files(piece))
            except StorageFault as fault:
                response.error.msg = fault.debug
            except CipherFault as fault:
                response.error.msg = f'Other("{fault}")'
        return response

    def _files(self, piece: _Piece) -> Iterator[brpb_pb2.File]:
        """The file of a piece, none when it holds no live row."""
        conversion = Conversion(self._node.api_version, ApiVersion(self._request.dst_api_version))
        options = sst_options(self._request.compression_type, self._request.compression_level)
        with tempfile.TemporaryDirectory(dir=self._node.data_dir, prefix="backup-") as folder:
            path = Path(folder) / "region.sst"
            written = write_sst(conversion.rows(self._rows(piece), self._node.now()), path, options)
            if written is not None:
                start, end = conversion.target_range(piece.start, piece.end)
                yield self._save(piece, path.read_bytes(), written, start, end)

    def _rows(self, piece: _Piece) -> Iterator[Row]:
        start, end = map(self._codec.bound, (piece.start, piece.end))
        return self._node.engine.iterate(DATA_PREFIX + start, DATA_PREFIX + end if end else b"")

    def _save(self, piece: _Piece, plain: bytes, written: Written, start: bytes, end: bytes) -> brpb_pb2.File:
        iv = secrets.token_bytes(cipher.IV_SIZE)  # told even of plain files
        data = cipher.crypt(self._request.cipher_info, iv, plain)
        name = self._name(piece)
        self._storage.write(name, data)
        self._node.pace.work(written.total_bytes)
        if self._request.rate_limit:
            time.sleep(len(data) / self._request.rate_limit)
        return brpb_pb2.File(
            name=name,
            sha256=hashlib.sha256(data).digest(),
            start_key=start,
            end_key=end,
            crc64xor=written.crc64xor,
            total_kvs=written.total_kvs,
            total_bytes=written.total_bytes,
            cf=self._cf,
            size=len(data),
            cipher_iv=iv,
        )

    def _name(self, piece: _Piece) -> str:
        """Unique by start key and time; of an unbounded start neither is known, and a retry overwrites."""
        separator = "/" if self._storage.nested else "_"
        name = f"{self._node.store_id}{separator}{piece.region.id}_{piece.region.version}"
        if piece.start:
            name += f"_{hashlib.sha256(piece.start).hexdigest()}_{time.time_ns() // 1_000_000}"
        return f"{name}_{self._cf}.sst"


def _failure(message: str) -> brpb_pb2.BackupResponse:
    """The response that ends a request before any region was tried."""
    return brpb_pb2.BackupResponse(error=brpb_pb2.Error(msg=message))
