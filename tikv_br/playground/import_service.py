"""``ImportSST`` of one store: Download, Upload, Ingest, import mode and the download speed limit."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import grpc

from tikv_br.cluster.pb import errorpb_pb2, import_sstpb_pb2, import_sstpb_pb2_grpc, kvrpcpb_pb2
from tikv_br.playground.ingest import DownloadFault, IngestFault, Ingestor, StorePanics, download, is_incompatible
from tikv_br.playground.node import DOWNLOAD_UNKNOWN_CF, DOWNLOAD_WITHOUT_Z, INGEST_DEADLY_SST, StoreNode, crash_store
from tikv_br.playground.sst_file import COLUMN_FAMILIES, BadMeta, UnreadableSst

TIMEOUT: Final = 600.0
"""Seconds after the last SwitchMode(Import) at which a store returns to Normal (`import.import-mode-timeout`)."""


class ImportMode:
    """The mode of one store. Thread-safe. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0

    def switch(self, *, importing: bool) -> None:
        """Enter import mode, or stay in it for another ten minutes, or leave it."""
        self._until = self._clock() + TIMEOUT if importing else 0.0

    @property
    def importing(self) -> bool:
        """Return whether import mode is on."""
        return self._clock() < self._until


class DownloadLimit:
    """The download speed limit of one store, which its downloads share. Thread-safe. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.current = 0
        """Bytes per second; 0 = unlimited."""

    def set(self, limit: int) -> None:
        """Limit downloads that start from now on, to ``limit`` bytes per second; 0 = unlimited."""
        with self._lock:
            if limit != self.current:
                self.current, self._free_at = limit, 0.0

    def delay(self, size: int) -> float:
        """Seconds that a download of ``size`` bytes, which starts now, must take."""
        now = self._clock()
        with self._lock:
            if not self.current:
                return 0.0
            self._free_at = max(self._free_at, now) + size / self.current
            return self._free_at - now


_INVALID_CHUNK: Final = "InvalidChunk"


class ImportService(import_sstpb_pb2_grpc.ImportSSTServicer):
    """Serves one store. ``nodes`` are all stores of the cluster by id."""

    def __init__(self, node: StoreNode, nodes: Mapping[int, StoreNode]) -> None:
        self._node = node
        self._ingestor = Ingestor(node, nodes)
        self._ingesting: set[bytes] = set()
        self._lock = threading.Lock()

    def add_to(self, server: grpc.Server) -> None:
        import_sstpb_pb2_grpc.add_ImportSSTServicer_to_server(self, server)

    def SwitchMode(  # noqa: N802
        self, request: import_sstpb_pb2.SwitchModeRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.SwitchModeResponse:
        del context
        self._node.import_mode.switch(importing=request.mode == import_sstpb_pb2.Import)
        return import_sstpb_pb2.SwitchModeResponse()

    def GetMode(  # noqa: N802
        self, request: import_sstpb_pb2.GetModeRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.GetModeResponse:
        """UNIMPLEMENTED on the recorded servers."""
        del request
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def SetDownloadSpeedLimit(  # noqa: N802
        self, request: import_sstpb_pb2.SetDownloadSpeedLimitRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.SetDownloadSpeedLimitResponse:
        """Set the limit without an end: TiKV 9.0 ignores the fields for a task's name and a TTL."""
        del context
        self._node.download_limit.set(request.speed_limit)
        return import_sstpb_pb2.SetDownloadSpeedLimitResponse()

    def Download(  # noqa: N802
        self, request: import_sstpb_pb2.DownloadRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.DownloadResponse:
        """Fetch, check, cut and rewrite one file. Neither the region nor the API version is checked."""
        if (request.sst.cf_name or COLUMN_FAMILIES[0]) not in COLUMN_FAMILIES:
            crash_store(self._node, context, "Download", f"{DOWNLOAD_UNKNOWN_CF}: {request.sst.cf_name}")
        try:
            kept = download(self._node, request)
        except (BadMeta, DownloadFault) as fault:
            return import_sstpb_pb2.DownloadResponse(error=import_sstpb_pb2.Error(message=str(fault)))
        except StorePanics as panic:
            crash_store(self._node, context, "Download", f"{DOWNLOAD_WITHOUT_Z}: {request.name}: {panic}")
        if kept is None:
            return import_sstpb_pb2.DownloadResponse(is_empty=True)
        return import_sstpb_pb2.DownloadResponse(range=kept)

    def Upload(  # noqa: N802
        self, request_iterator: Iterator[import_sstpb_pb2.UploadRequest], context: grpc.ServicerContext
    ) -> import_sstpb_pb2.UploadResponse:
        """Save the bytes that follow the meta. Only their crc32 is checked; the ingest checks what they are."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("chunk") != "meta":
            context.abort(grpc.StatusCode.UNKNOWN, _INVALID_CHUNK)
        data = bytearray()
        for chunk in request_iterator:
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
        return import_sstpb_pb2.UploadResponse()

    def Ingest(  # noqa: N802
        self, request: import_sstpb_pb2.IngestRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.IngestResponse:
        return self._ingest("Ingest", request.context, [request.sst], context)

    def MultiIngest(  # noqa: N802
        self, request: import_sstpb_pb2.MultiIngestRequest, context: grpc.ServicerContext
    ) -> import_sstpb_pb2.IngestResponse:
        return self._ingest("MultiIngest", request.context, list(request.ssts), context)

    def _ingest(
        self,
        rpc: str,
        sent: kvrpcpb_pb2.Context,
        metas: Sequence[import_sstpb_pb2.SSTMeta],
        context: grpc.ServicerContext,
    ) -> import_sstpb_pb2.IngestResponse:
        if any(is_incompatible(meta, self._node.api_version) for meta in metas):
            context.abort(grpc.StatusCode.UNKNOWN, "IncompatibleApiVersion")
        uuids = {meta.uuid for meta in metas}
        with self._lock:
            if len(uuids) < len(metas) or self._ingesting & uuids:
                return import_sstpb_pb2.IngestResponse(error=errorpb_pb2.Error(message="ingest file conflict"))
            self._ingesting |= uuids
        try:
            self._ingestor.ingest(rpc, sent, metas)
        except IngestFault as fault:
            return import_sstpb_pb2.IngestResponse(error=fault.error)
        except (StorePanics, UnreadableSst) as death:
            crash_store(self._node, context, rpc, f"{INGEST_DEADLY_SST}: {death}")
        finally:
            with self._lock:
                self._ingesting -= uuids
        return import_sstpb_pb2.IngestResponse()
