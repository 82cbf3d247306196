"""``import_sstpb.ImportSST`` of one store: it takes SSTs in (Download, Upload) and makes them part of its data (Ingest)."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import grpc

from tikv_br.cluster.pb import errorpb_pb2, import_sstpb_pb2, import_sstpb_pb2_grpc, kvrpcpb_pb2
from tikv_br.playground import crimes
from tikv_br.playground.download import DownloadFault, StorePanics, download
from tikv_br.playground.faulty_storage import open_for
from tikv_br.playground.import_mode import ImportMode
from tikv_br.playground.ingest import IngestFault, Ingestor, incompatible
from tikv_br.playground.node import StoreNode
from tikv_br.playground.speed_limit import SpeedLimit
from tikv_br.playground.sst_file import UnreadableSst
from tikv_br.playground.sst_store import COLUMN_FAMILIES, BadMeta, SstStore

_INVALID_CHUNK: Final = "InvalidChunk"


class ImportService(import_sstpb_pb2_grpc.ImportSSTServicer):
    """Serves one store. ``stores`` are the waiting files of every store of the cluster, by store id."""

    def __init__(self, node: StoreNode, stores: Mapping[int, SstStore], mode: ImportMode) -> None:
        self._node = node
        self._files = stores[node.store_id]
        self._ingestor = Ingestor(node, stores)
        self._mode = mode
        self._speed_limit = SpeedLimit()
        self._ingesting: set[bytes] = set()
        self._lock = threading.Lock()

    def add_to(self, server: grpc.Server) -> None:
        """Register the service."""
        import_sstpb_pb2_grpc.add_ImportSSTServicer_to_server(self, server)

    def SwitchMode(  # noqa: N802
        self, request: import_sstpb_pb2.SwitchModeRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.SwitchModeResponse:
        """Enter import mode for ten minutes, or leave it."""
        del context
        self._mode.switch(importing=request.mode == import_sstpb_pb2.Import)
        return import_sstpb_pb2.SwitchModeResponse()

    def GetMode(  # noqa: N802
        self, request: import_sstpb_pb2.GetModeRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.GetModeResponse:
        """Not known to the servers that were recorded."""
        del request
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def SetDownloadSpeedLimit(  # noqa: N802
        self, request: import_sstpb_pb2.SetDownloadSpeedLimitRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.SetDownloadSpeedLimitResponse:
        """Set one task's limit; the smallest of all counts. A named task's limit must say how long it holds."""
        if request.task_id and request.speed_limit and not request.ttl_seconds:
            context.abort(grpc.StatusCode.UNKNOWN, "ttl_seconds must be set for the speed limit of a task")
        self._speed_limit.set(request.task_id, request.speed_limit, request.ttl_seconds)
        return import_sstpb_pb2.SetDownloadSpeedLimitResponse()

    def Download(  # noqa: N802
        self, request: import_sstpb_pb2.DownloadRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.DownloadResponse:
        """Fetch, check, cut and rewrite one file. Neither the region nor the API version is looked at."""
        if (request.sst.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
            what = f"{crimes.DOWNLOAD_UNKNOWN_CF}: {request.sst.cf_name}"
            crimes.store_dies(self._node, context, "Download", what)

        def fetched(size: int) -> float:
            self._node.downloads[request.name] += 1
            self._node.pace.work(request.sst.total_bytes)
            return self._speed_limit.delay(size)

        try:
            kept = download(self._files, request, partial(open_for, self._node), fetched)
        except (BadMeta, DownloadFault) as fault:
            return import_sstpb_pb2.DownloadResponse(error=import_sstpb_pb2.Error(message=str(fault)))
        except StorePanics as panic:
            what = f"{crimes.DOWNLOAD_WITHOUT_Z}: {request.name}: {panic}"
            crimes.store_dies(self._node, context, "Download", what)
        if kept is None:
            return import_sstpb_pb2.DownloadResponse(is_empty=True)
        return import_sstpb_pb2.DownloadResponse(range=kept)

    def Upload(  # noqa: N802
        self, request_iterator: Iterator[import_sstpb_pb2.UploadRequest], context: grpc.ServicerContext
    ) -> import_sstpb_pb2.UploadResponse:
        """Keep the bytes that come after the meta. Only their crc32 is looked at: what they are shows at the ingest."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("chunk") != "meta":
            context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
        data = bytearray()
        for chunk in request_iterator:
            if not chunk.data:
                context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
            data += chunk.data
        try:
            saved, temp = self._files.saved(first.meta), self._files.temp(first.meta)
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
        return import_sstpb_pb2.UploadResponse()

    def Ingest(  # noqa: N802
        self, request: import_sstpb_pb2.IngestRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.IngestResponse:
        """Ingest one file that waits here."""
        return self._ingest("Ingest", request.context, [request.sst], context)

    def MultiIngest(  # noqa: N802
        self, request: import_sstpb_pb2.MultiIngestRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.IngestResponse:
        """Ingest several files that wait here, all or none."""
        return self._ingest("MultiIngest", request.context, list(request.ssts), context)

    def Compact(  # noqa: N802
        self, request: import_sstpb_pb2.CompactRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.CompactResponse:
        """Not a thing of the playground."""
        del request
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def RawWrite(  # noqa: N802
        self, request_iterator: Iterator[import_sstpb_pb2.RawWriteRequest], context: grpc.ServicerContext
    ) -> import_sstpb_pb2.RawWriteResponse:
        """Not a thing of the playground."""
        del request_iterator
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def _ingest(
        self,
        rpc: str,
        asked: kvrpcpb_pb2.Context,
        metas: Sequence[import_sstpb_pb2.SSTMeta],
        context: grpc.ServicerContext,
    ) -> import_sstpb_pb2.IngestResponse:
        if any(incompatible(meta, self._node.api_version) for meta in metas):
            context.abort(grpc.StatusCode.UNKNOWN, "IncompatibleApiVersion")
        uuids = {meta.uuid for meta in metas}
        with self._lock:
            if len(uuids) < len(metas) or self._ingesting & uuids:
                return _refused(errorpb_pb2.Error(message="ingest file conflict"))
            self._ingesting |= uuids
        try:
            self._ingestor.ingest(rpc, asked, metas)
        except IngestFault as fault:
            return _refused(fault.error)
        except (StorePanics, UnreadableSst) as death:
            crimes.store_dies(self._node, context, rpc, f"{crimes.INGEST_DEADLY_SST}: {death}")
        finally:
            with self._lock:
                self._ingesting -= uuids
        return import_sstpb_pb2.IngestResponse()


def _refused(error: errorpb_pb2.Error) -> import_sstpb_pb2.IngestResponse:
    return import_sstpb_pb2.IngestResponse(error=error)
