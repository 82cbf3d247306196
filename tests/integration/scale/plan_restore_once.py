"""Plans a restore as the driver does, and prints its cost: ``python -m …plan_restore_once GRPC_ADDRESS HTTP_ADDRESS``.

A file for every four regions of the target, each from within a region; every fourth is done already. A process of its own, so
that its memory is the driver's. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

from tests.support.peak_memory import peak_mib
from tikv_br.backupset.files import FileEntry, FilePair
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.split import by_region
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.plan import RestoreRange, choose_parts, remaining_parts
from tikv_br.restore.run import plan_changes
from tikv_br.storage.url import StorageLocation

FILE_BYTES = 60 << 20
EACH = 4
"""Regions to a file."""


def main(grpc: str, http: str) -> None:
    """Plan for the whole of keyspace 0."""
    del http
    config = ClusterConfig(pd=(grpc,))
    codec = KeyCodec(ApiVersion.V2)
    whole = codec.rpc_range()
    with Cluster.connect(config) as cluster:
        count = len(cluster.pd.scan_regions(b"", b""))
        files = made_up(codec, whole, count // EACH)
        context = RestoreContext(RestoreOptions(config, StorageLocation("local", "/unused")))
        context.cluster = cluster
        context.backup = context.info = cast("Any", SimpleNamespace(api_version=ApiVersion.V2, key_mode=KeyMode.RAW))
        begin = time.process_time()
        context.wanted = [RestoreRange(whole)]
        context.parts = choose_parts(map(FilePair, files), context.wanted)
        context.todo = remaining_parts(context.parts, [file.key_range for file in files[::4]])
        plan_changes(context)
        assert context.plan is not None
        groups = list(by_region(cluster, codec, context.plan.splits))
        seconds = time.process_time() - begin
    assert sum(map(len, groups)) == len(context.plan.splits)
    figures = {
        "cpu_seconds": seconds,
        "peak_mib": peak_mib(),
        "files": len(files),
        "left": len(context.todo),
        "regions": context.plan.regions,
        "splits": len(context.plan.splits),
    }
    print(json.dumps(figures))  # noqa: T201 - for the test that started it


def made_up(codec: KeyCodec, whole: KeyRange, count: int) -> list[FileEntry]:
    """So many files that cover a range."""
    inner = [codec.rpc_key(b"user:%012d:middle" % (number * EACH)) for number in range(1, count)]
    return [
        FileEntry(
            name=f"sst/{start.hex()}_0123456789abcdef_00000_default.sst",
            size=FILE_BYTES // 3,
            start_key=start,
            end_key=end,
            crc64xor=1,
            total_kvs=500_000,
            total_bytes=FILE_BYTES,
        )
        for start, end in itertools.pairwise([whole.start, *inner, whole.end])
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
