"""Plans a backup as the driver does, and prints its cost: ``python -m …plan_once GRPC_ADDRESS HTTP_ADDRESS``.

A process of its own, so that its memory is the driver's: interpreter, packages and plan. Prints one JSON object.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from tests.support.http_pd import HttpConnection
from tests.support.peak_memory import peak_mib
from tikv_br.backup import copy
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd_http import PdHttp
from tikv_br.dataflow import steps
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine
from tikv_br.dataflow.run import BackupContext
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.storage.url import StorageLocation

SLOTS = 250
"""Slots of the planned executor; there are four tasks for each."""


def main(grpc: str, http: str) -> None:
    """Plan the whole of keyspace 0."""
    config = ClusterConfig(pd=(grpc,))
    with Cluster.connect(config) as cluster:
        cluster.pd_http = PdHttp(HttpConnection(config, http))
        codec = KeyCodec(ApiVersion.V2)
        context = BackupContext(BackupOptions(config, StorageLocation("local", "/unused"), engine="scan"))
        context.cluster, context.conversion = cluster, Conversion(ApiVersion.V2, ApiVersion.V2)
        context.source_ranges = (codec.rpc_range(),)
        context.engine = Engine("scan", "", "spark", "", SLOTS)
        context.info = cast("Any", SimpleNamespace(stores=()))
        begin = time.process_time()
        steps.make_plan(context)
        seconds = time.process_time() - begin
    tasks, closure = handed_over(context)
    figures = {
        "cpu_seconds": seconds,
        "peak_mib": peak_mib(),
        "tasks": len(tasks),
        "regions": sum(interval.regions for interval in context.plan),
        "task_bytes": max(len(pickle.dumps(task)) for task in tasks),
        "closure_bytes": len(pickle.dumps(closure)),
    }
    print(json.dumps(figures))  # noqa: T201 - for the test that started it


def handed_over(context: BackupContext) -> tuple[Sequence[object], object]:
    """Return the tasks and the function that a copy gives to the executor, pickled by it for the workers."""
    taken: list[tuple[Sequence[object], object]] = []

    def run_tasks(tasks: Sequence[object], function: object, **_: object) -> float:
        taken.append((tasks, function))
        return 0.0

    with mock.patch.object(steps, "run_tasks", run_tasks):
        copy.copy(context)
    return taken[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
