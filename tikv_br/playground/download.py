"""One Download: fetch a file of a backup, look it through, cut and rewrite it, and keep it for the ingest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rocksdict import SstFileWriter

from formats.keys import DATA_PREFIX
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2
from tikv_br.playground import cipher, sst_file
from tikv_br.playground.backup_writer import Row, sst_options
from tikv_br.playground.cipher import CipherFault
from tikv_br.playground.external_storage import ExternalStorage, StorageFault
from tikv_br.playground.rewrite import Rewrite, WrongPrefix
from tikv_br.playground.sst_file import SstFacts, UnreadableSst
from tikv_br.playground.sst_store import SstStore


class DownloadFault(Exception):
    """The file cannot be had, or not so; the message goes into the answer."""


class StorePanics(Exception):
    """A real store would die of this request."""


def download(
    store: SstStore,
    request: import_sstpb_pb2.DownloadRequest,
    opened: Callable[[brpb_pb2.StorageBackend], ExternalStorage],
    delay: Callable[[int], float],
) -> import_sstpb_pb2.Range | None:
    """Do what the request says; the outermost keys kept (without ``z``), None when none are.

    A file that is here already is not fetched again. ``opened`` gives the storage of a request (it may raise `StorageFault`),
    ``delay``, asked once for each file that is fetched, how many seconds so many bytes take. Raises `BadMeta`, `DownloadFault` and
    `StorePanics`.
    """
    meta = request.sst
    saved, temp = store.saved(meta), store.temp(meta)
    try:
        if saved.exists():
            return _range(store.facts(saved), meta)
        rewrite = Rewrite.of(request.rewrite_rule, meta)
        temp.write_bytes(_fetch(opened(request.storage_backend), request, temp, delay))
        facts = store.facts(temp)
        return _keep(store, temp, saved, facts, rewrite, meta)
    except StorageFault as fault:
        raise DownloadFault(fault.display) from fault
    except UnreadableSst as error:
        raise DownloadFault(_engine_error(str(error))) from error
    except WrongPrefix as error:
        raise DownloadFault(str(error)) from error
    finally:
        temp.unlink(missing_ok=True)


def _fetch(
    storage: ExternalStorage,
    request: import_sstpb_pb2.DownloadRequest,
    temp: Path,
    delay: Callable[[int], float],
) -> bytes:
    """The plain bytes of the file, of the length that was promised."""
    source = f"Cannot read {storage.url}/{request.name} into {temp}"
    try:
        data = storage.read(request.name)
    except StorageFault as fault:
        raise DownloadFault(f"{source}: {fault.display}") from fault
    time.sleep(delay(len(data)))
    if request.sst.length and len(data) != request.sst.length:
        raise DownloadFault(f"{source}: downloaded size {len(data)}, expected {request.sst.length}")
    try:
        return cipher.crypt(request.cipher_info, request.sst.cipher_iv, data)
    except CipherFault as fault:
        raise DownloadFault(str(fault)) from fault


def _keep(
    store: SstStore,
    temp: Path,
    saved: Path,
    facts: SstFacts,
    rewrite: Rewrite,
    meta: import_sstpb_pb2.SSTMeta,
) -> import_sstpb_pb2.Range | None:
    """Move the file to where it waits: as it is when all of it fits, else written anew."""
    if not facts.entries:  # the ingest will show that it cannot be; a download does not
        temp.rename(saved)
        return _range(facts, meta)
    if not facts.first.startswith(DATA_PREFIX):
        raise StorePanics(f"invalid data key {facts.first.hex()}")
    first, last = facts.first[1:], facts.last[1:]
    if not rewrite.changes_keys and rewrite.keeps(first) and rewrite.keeps(last):
        temp.rename(saved)
        return _range(facts, meta)
    with sst_file.opened(temp) as db:
        if not _write(_rewritten(sst_file.rows_of(db), rewrite), saved):
            return None
    return _range(store.facts(saved), meta)


def _rewritten(rows: Iterator[Row], rewrite: Rewrite) -> Iterator[Row]:
    for key, value in rows:
        if rewrite.is_past(key[1:]):
            return
        if rewrite.keeps(key[1:]):
            yield DATA_PREFIX + rewrite.apply(key[1:]), value


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


def _range(facts: SstFacts, meta: import_sstpb_pb2.SSTMeta) -> import_sstpb_pb2.Range:
    if not facts.entries:  # RocksDB does not open it here, though TiKV would have read it
        return import_sstpb_pb2.Range(start=meta.range.start, end=meta.range.start)
    return import_sstpb_pb2.Range(start=facts.first[1:], end=facts.last[1:])


def _engine_error(status: str) -> str:
    return f'Engine Engine(Status {{ code: IoError, sub_code: None, sev: NoError, state: "{status}" }})'
