"""Plans and commits a backup as the driver does, and prints its cost: ``python -m …back_up_once GRPC_ADDRESS HTTP_ADDRESS FOLDER``.

The tasks are run by a process of their own (`finished_tasks`), so that time and memory are the driver's: interpreter, packages, plan,
outcomes, and the manifest. Prints one JSON object.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

from tests.support.http_pd import HttpConnection
from tests.support.ledgers import begin_backup
from tests.support.peak_memory import peak_mib
from tests.support.tools import ROOT
from tikv_br.backup import copy
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd_http import PdHttp
from tikv_br.cluster.topology import ClusterInfo
from tikv_br.dataflow import steps
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.plan import Engine
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.write import TaskResult
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import silent
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.tasks.task import Collector

SLOTS = 250
"""Slots of the planned executor; there are four tasks for each."""


def main(grpc: str, http: str, folder: str) -> None:
    """Back up the whole of keyspace 0."""
    began = time.process_time()
    config, place = ClusterConfig(pd=(grpc,)), StorageLocation("local", folder)
    with Cluster.connect(config) as cluster:
        cluster.pd_http = PdHttp(HttpConnection(config, http))
        context = BackupContext(BackupOptions(config, place, engine="scan"), run_id="r" * 32)
        context.cluster, context.conversion = cluster, Conversion(ApiVersion.V2, ApiVersion.V2)
        context.source_ranges = (KeyCodec(ApiVersion.V2).rpc_range(),)
        context.engine = Engine("scan", "", "spark", "", SLOTS)
        context.info = ClusterInfo(7, "8.5.2", ApiVersion.V2, ())
        context.store = open_store(place)
        context.writer = begin_backup(context.store)
        context.backup_ts = context.scanned_ts = 1
        context.listed = False
        steps.make_plan(context)
        planned = time.process_time()
        plan_mib = peak_mib()
        with mock.patch.object(steps, "run_tasks", run_elsewhere):
            copy.copy(context)
        copied = time.process_time()
        copy_mib = peak_mib()
        steps.verify_coverage(context)
        steps.commit(context)
    assert context.manifest is not None
    figures = {
        "cpu_seconds": time.process_time() - began,
        "plan_seconds": planned - began,
        "copy_seconds": copied - planned,
        "peak_mib": peak_mib(),
        "plan_mib": plan_mib,
        "copy_mib": copy_mib,
        "tasks": len(context.finished),
        "regions": sum(interval.regions for interval in context.plan),
        "files": len(context.manifest.files),
        "total_kvs": context.manifest.statistics.total_kvs,
    }
    print(json.dumps(figures))  # noqa: T201 - for the test that started it


def run_elsewhere(
    tasks: Sequence[KeyRange],
    function: partial[TaskResult],
    *,
    on_result: Callable[[TaskResult], None],
    **_: object,
) -> float:
    """As `tikv_br.tasks.executor.run_tasks`: the outcomes come as messages, here from one process that only leaves what tasks leave."""
    job = function.args[0]
    collector: Collector[TaskResult] = Collector(len(tasks), on_result, silent)
    command = [sys.executable, "-m", "tests.integration.scale.finished_tasks", job.options.storage.path, job.run]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for index, task in enumerate(tasks):
            pickle.dump((index, task), process.stdin)
            process.stdin.flush()
            collector.process(pickle.load(process.stdout))
        process.stdin.close()
    assert collector.complete
    return 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
