"""``ImportSST`` of one store: Download, Upload, Ingest, import mode and the download speed limit."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import grpc

from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.pb import import_sstpb_pb2 as pb
from tikv_br.playground.ingest import DownloadFault, IngestFault, Ingestor, StorePanics, download, is_incompatible
from tikv_br.playground.node import DOWNLOAD_UNKNOWN_CF, DOWNLOAD_WITHOUT_Z, INGEST_DEADLY_SST, StoreNode, crash_store
from tikv_br.playground.servers import unary
from tikv_br.playground.sst_file import COLUMN_FAMILIES, BadMeta, UnreadableSst

_INVALID_CHUNK: Final = "InvalidChunk"


class ImportService:
    """Serves one store. ``nodes`` are all stores of the cluster by id."""

    def __init__(self, node: StoreNode, nodes: Mapping[int, StoreNode]) -> None:
        self._node = node
        self._ingestor = Ingestor(node, nodes)
        self._ingesting: set[bytes] = set()
        self._lock = threading.Lock()

    def add_to(self, server: grpc.Server) -> None:
        handlers = {
            "SwitchMode": unary(pb.SwitchModeRequest, self._switch_mode),
            "GetMode": unary(pb.GetModeRequest, self._get_mode),
            "SetDownloadSpeedLimit": unary(pb.SetDownloadSpeedLimitRequest, self._set_download_limit),
            "Download": unary(pb.DownloadRequest, self._download),
            "Upload": grpc.stream_unary_rpc_method_handler(
                self._upload, pb.UploadRequest.FromString, pb.UploadResponse.SerializeToString
            ),
            "Ingest": unary(
                pb.IngestRequest, lambda request, call: self._ingest("Ingest", request.context, [request.sst], call)
            ),
            "MultiIngest": unary(
                pb.MultiIngestRequest,
                lambda request, call: self._ingest("MultiIngest", request.context, list(request.ssts), call),
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("import_sstpb.ImportSST", handlers)])

    def _switch_mode(self, request: pb.SwitchModeRequest, _context: grpc.ServicerContext) -> pb.SwitchModeResponse:
        self._node.import_mode.switch(importing=request.mode == pb.Import)
        return pb.SwitchModeResponse()

    def _get_mode(self, _request: pb.GetModeRequest, context: grpc.ServicerContext) -> pb.GetModeResponse:
        """UNIMPLEMENTED on the recorded servers."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def _set_download_limit(
        self, request: pb.SetDownloadSpeedLimitRequest, _context: grpc.ServicerContext
    ) -> pb.SetDownloadSpeedLimitResponse:
        """Set the limit without an end: TiKV 9.0 ignores the fields for a task's name and a TTL."""
        self._node.download_limit.limit(request.speed_limit)
        return pb.SetDownloadSpeedLimitResponse()

    def _download(self, request: pb.DownloadRequest, context: grpc.ServicerContext) -> pb.DownloadResponse:
        """Fetch, check, cut and rewrite one file. Neither the region nor the API version is checked."""
        if (request.sst.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
            crash_store(self._node, context, "Download", f"{DOWNLOAD_UNKNOWN_CF}: {request.sst.cf_name}")
        try:
            kept = download(self._node, request)
        except (BadMeta, DownloadFault) as fault:
            return pb.DownloadResponse(error=pb.Error(message=str(fault)))
        except StorePanics as panic:
            crash_store(self._node, context, "Download", f"{DOWNLOAD_WITHOUT_Z}: {request.name}: {panic}")
        if kept is None:
            return pb.DownloadResponse(is_empty=True)
        return pb.DownloadResponse(range=kept)

    def _upload(self, requests: Iterator[pb.UploadRequest], context: grpc.ServicerContext) -> pb.UploadResponse:
        """Save the bytes that follow the meta. Only their crc32 is checked; the ingest checks what they are."""
        first = next(requests, None)
        if first is None or first.WhichOneof("chunk") != "meta":
            context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
        data = bytearray()
        for chunk in requests:
            if not chunk.data:
                context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
            data += chunk.data
        try:
            saved, temp = self._node.files.path(first.meta), self._node.files.temp_path(first.meta)
        except BadMeta as fault:
            context.abort(grpc.StatusCode.UNKNOWN, f'Uuid("{fault}")')
        if saved.exists():
            context.abort(grpc.StatusCode.UNKNOWN, f'FileExists("{saved}", "upload")')
        crc = zlib.crc32(data)
        if crc != first.meta.crc32:
            reason = f"crc32 is {crc}, expected {first.meta.crc32}"
            context.abort(grpc.StatusCode.UNKNOWN, f'FileCorrupted("{temp}", "{reason}")')
        temp.write_bytes(data)
        temp.rename(saved)
        return pb.UploadResponse()

    def _ingest(
        self,
        rpc: str,
        sent: kvrpcpb_pb2.Context,
        metas: Sequence[pb.SSTMeta],
        context: grpc.ServicerContext,
    ) -> pb.IngestResponse:
        if any(is_incompatible(meta, self._node.api_version) for meta in metas):
            context.abort(grpc.StatusCode.UNKNOWN, "IncompatibleApiVersion")
        uuids = {meta.uuid for meta in metas}
        with self._lock:
            if len(uuids) < len(metas) or self._ingesting & uuids:
                return pb.IngestResponse(error=errorpb_pb2.Error(message="ingest file conflict"))
            self._ingesting |= uuids
        try:
            self._ingestor.ingest(rpc, sent, metas)
        except IngestFault as fault:
            return pb.IngestResponse(error=fault.error)
        except (StorePanics, UnreadableSst) as death:
            crash_store(self._node, context, rpc, f"{INGEST_DEADLY_SST}: {death}")
        finally:
            with self._lock:
                self._ingesting -= uuids
        return pb.IngestResponse()
