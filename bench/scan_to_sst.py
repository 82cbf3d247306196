"""Scan → API V2 → SST → storage: the scan engine's task, beside rivals on the same pages from the same server."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench import rivals
from bench.dataset import KEY_SIZE, Dataset
from bench.go_client import scan_loop
from bench.harness import Figure, Goal, Scale, Work, cpu_seconds, rates
from bench.replay import replaying
from tikv_br.backup.scan import run_scan_task
from tikv_br.cluster.cluster import ClusterPool
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.write import BackupJob
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.sst.compression import Compression
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import SharedObjects, TaskContext, run_task

VALUE_SIZES = (100, 1024)
FILE_BYTES = 96 << 20
REGION_BYTES = 16 << 20
"""Size of most regions: a sixth of the maximum that stores allow."""
MEMORY = Path("/dev/shm")  # noqa: S108 - so that no disk is measured; folders in it have names of their own
_GOALS = {100: 300.0, 1024: 450.0}


def figures(scale: Scale) -> Iterator[Figure]:
    """MB/s per core: our task with each compression, then what others take for the same."""
    for size in VALUE_SIZES:
        dataset = Dataset(scale.data_bytes // (size + KEY_SIZE), size, scale.data)
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(replaying(dataset, max(2, dataset.user_bytes // REGION_BYTES)))
            clusters = stack.enter_context(ClusterPool())  # tasks of one process share connections
            cluster = clusters.get(ClusterConfig(pd=(address,)))
            subjects: dict[str, Work] = {
                "tikv-br, zstd 1": _task(address, Compression.ZSTD, clusters),
                "tikv-br, lz4": _task(address, Compression.LZ4, clusters),
                "rocksdict writer, zstd 1": _to_folder(partial(rivals.rocksdict_writer, cluster)),
                "per-key Python, zstd 1": _to_folder(partial(rivals.per_key_python, cluster)),
            }
            if loop := scan_loop(address, stack):
                subjects["client-go, scan alone"] = loop
            goals = {"tikv-br, zstd 1": Goal("value", at_least=_GOALS[size])}
            goals |= {"rocksdict writer, zstd 1": Goal("ratio", at_least=2)}
            goals |= {"client-go, scan alone": Goal("ratio", at_least=3)} if size == 100 else {}
            goals = goals if scale.data == "half" else {}
            megabytes = dataset.user_bytes / 1e6
            yield from rates("scan to SST", f"{size} B", megabytes, "MB/s per core", subjects, scale.rounds, goals)


def scan_task(
    address: str, folder: str, compression: Compression, end: bytes = b"", clusters: ClusterPool | None = None
) -> None:
    """Run the scan engine's task over the server's rows up to a key, from API V1 to V2, into a folder; by default over a new connection."""
    options = BackupOptions(
        ClusterConfig(pd=(address,)), StorageLocation("local", folder), compression=compression, file_bytes=FILE_BYTES
    )
    job = BackupJob("bench", options, Conversion(ApiVersion.V1, ApiVersion.V2, ts=1))
    context = TaskContext(0, 0, lambda _: None, shared=SharedObjects([clusters] if clusters else []))
    outcome = run_task(partial(run_scan_task, job), KeyRange(b"", end), "bench", context)
    if outcome.kind != "result" and isinstance(outcome.body, bytes):
        raise pickle.loads(outcome.body)  # noqa: S301 - our own


def _task(address: str, compression: Compression, clusters: ClusterPool) -> Work:
    return _to_folder(lambda folder: scan_task(address, folder, compression, clusters=clusters))


def _to_folder(action: Callable[[str], object]) -> Work:
    """Seconds of processor time of a run into a folder of its own."""
    return into_folder(lambda folder: cpu_seconds(lambda: action(folder))())


def into_folder(measure: Callable[[str], float]) -> Work:
    """A run into a folder of its own, in memory where the system has such a place."""

    def run() -> float:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            return measure(folder)

    return run
