"""``tikv-br sync`` in processes made to be killed, which begin within moments."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

import tikv_br.storage.local  # noqa: F401 - what a sync imports, once for all of them
from tests.support.forks import Forks
from tikv_br import signals
from tikv_br.cli import sync_cmd  # noqa: F401
from tikv_br.cli.main import run
from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.formats import cdc
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.incremental.checkpoint import ObjectCheckpoints
from tikv_br.incremental.sorter import pieces
from tikv_br.incremental.sync import SyncOptions, sync
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

TOLD_TO_END = 143


class Syncs(Forks):
    """The process that they are forked off."""

    def __init__(self) -> None:
        super().__init__(__name__)

    def begin(self, arguments: Sequence[str]) -> int:
        """Run ``tikv-br sync`` with these; its pid."""
        return self.start(partial(run, ["sync", *arguments]))

    def kill(self, pid: int) -> None:
        """Kill it with SIGKILL, if it has not ended."""
        os.kill(pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def end(self, pid: int) -> None:
        """SIGTERM, which must end it in good order."""
        os.kill(pid, signal.SIGTERM)
        assert self.wait() == TOLD_TO_END


def run_sync(options: SyncOptions) -> int:
    """A sync with options that the command does not have, until SIGTERM."""
    stop = threading.Event()
    with signals.stopping(stop):
        sync(options, stop, lambda _: None)
    return 0


def saved(state: Path, name: str) -> int:
    """The checkpoint in a folder that a restart would find; 0 = none."""
    found = ObjectCheckpoints(open_store(parse(f"local://{state}")), name).load()
    return 0 if found is None else found.checkpoint_ts


def _load_kernels() -> None:
    """Once, not in each child."""
    codec = KeyCodec(ApiVersion.V2)
    message = cdcpb_pb2.ChangeDataEvent()
    message.events.add(region_id=1).entries.entries.add(
        start_ts=1,
        commit_ts=1,
        type=cdcpb_pb2.Event.LogType.COMMITTED,
        op_type=cdcpb_pb2.Event.Row.OpType.PUT,
        key=codec.rpc_key(b"k"),
        value=b"v",
    )
    event = cdc.parse(message.SerializeToString())
    assert event is not None
    rows = event.records(codec, codec.rpc_range())
    list(pieces([pa.RecordBatch.from_pylist([], schema=SCHEMA), rows], 1))


_load_kernels()
