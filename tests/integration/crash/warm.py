"""Imported by the process that forks operations: loads what these would load, once. Starts no thread that would outlive it."""

from __future__ import annotations

import tempfile

import tikv_br.backup.merge
import tikv_br.backup.run
import tikv_br.backup.scan
import tikv_br.backup.store
import tikv_br.drill.run
import tikv_br.incremental.backup
import tikv_br.restore.run
import tikv_br.restore.transfer
import tikv_br.storage.local  # noqa: F401
from tikv_br.backupset.rows import read_rows
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.write import DataFiles
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.rawscan import ScanPage, parse
from tikv_br.report.page import _environment
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


def _load_pages() -> None:
    """A template is compiled when it is first used."""
    for page in ("drill.html", "index.html"):
        _environment("tikv_br.drill").get_template(page)


def _load_kernels() -> None:
    """They are loaded with the modules that call them."""
    codec = KeyCodec(ApiVersion.V2)
    span = codec.rpc_range()
    answer = kvrpcpb_pb2.RawScanResponse()
    for number in range(3):
        answer.kvs.add(key=codec.rpc_key(b"key-%d" % number), value=b"value")
    page = parse(answer.SerializeToString())
    assert isinstance(page, ScanPage)
    conversion = Conversion(ApiVersion.V2, ApiVersion.V2, ts=1)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(StorageLocation("local", folder))
        converter = conversion.of(span)
        files = DataFiles(store, span, "warm", converter, BackupOptions(ClusterConfig(("nowhere:1",)), store.location))
        files.add(converter.convert_page(page, None))
        for file in files.finish():
            assert sum(batch.num_rows for batch in read_rows(store, file, codec, span)) == 3


_load_kernels()
_load_pages()
