"""Imported by the process that forks operations: loads what these would load, once. Starts no thread that would outlive it."""

from __future__ import annotations

import tempfile

import tikv_br.backup.run
import tikv_br.backup.scan_task
import tikv_br.backup.store_task
import tikv_br.drill.run
import tikv_br.restore.put
import tikv_br.restore.run
import tikv_br.storage.local  # noqa: F401
from formats.api_version import ApiVersion
from formats.keys import KeyCodec
from formats.rawscan import ScanPage, parse
from tikv_br.backup.convert import Conversion
from tikv_br.backup.data_files import DataFiles
from tikv_br.backup.row_writer import FileForm
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.proof.stored_rows import records
from tikv_br.report.page import _environment
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


def _load_pages() -> None:
    """A template is compiled when it is first used."""
    for page in ("drill.html", "index.html"):
        _environment("tikv_br.drill").get_template(page)


def _load_kernels() -> None:
    """Compiled code comes from Numba's cache at its first call."""
    codec = KeyCodec(ApiVersion.V2)
    span = KeyRange(*codec.rpc_range(b"", b""))
    answer = kvrpcpb_pb2.RawScanResponse()
    for number in range(3):
        answer.kvs.add(key=codec.rpc_key(b"key-%d" % number), value=b"value")
    page = parse(answer.SerializeToString())
    assert isinstance(page, ScanPage)
    conversion = Conversion(ApiVersion.V2, ApiVersion.V2, ts=1)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(StorageLocation("local", folder))
        files = DataFiles(store, span, span, "warm", form=FileForm(), codec=codec, file_bytes=1 << 20)
        files.add(conversion.of(span).convert_page(page, None))
        for file in files.finish():
            assert sum(batch.num_rows for batch in records(store, file, codec, span)) == 3


_load_kernels()
_load_pages()
