"""The steps that bring rows into the cluster, each as tasks on the driver or on Spark."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from tikv_br.restore.context import RestoreContext
from tikv_br.restore.ingest import ingest_part
from tikv_br.restore.job import IngestJob
from tikv_br.restore.options import Via
from tikv_br.restore.plan import Brought, FilePart
from tikv_br.restore.put import PutJob, put_part
from tikv_br.spark.executor import for_steering, run_tasks
from tikv_br.spark.task import TaskContext
from tikv_br.storage.backend import to_backend, to_cipher_info


def ingest(context: RestoreContext) -> None:
    """Have the stores fetch and take in every part."""
    options, backup = context.options, context.backup
    job = IngestJob(
        cluster=options.cluster,
        api_version=backup.api_version,
        store=backup.store,
        via=context.via,
        backend=_backend(context),
        cipher_info=to_cipher_info(options.storage).SerializeToString(),
        upload_limit=_upload_limit(context),
        slow_seconds=_slow_seconds(context),
        new_timestamp=context.restamp_ts,
        record=context.record,
    )
    _run(context, partial(ingest_part, job))


def _backend(context: RestoreContext) -> bytes:
    """Where stores are told to read, unless they need not."""
    options = context.options
    if context.via is Via.UPLOAD:
        return b""
    return to_backend(options.storage, send_credentials=options.send_credentials).SerializeToString()


def _upload_limit(context: RestoreContext) -> int:
    """Each process's share of the limit: tasks on the driver share one process, on Spark each has its own."""
    options, tasks = context.options, len(context.todo)
    kind = options.executor.executor if options.executor.executor != "auto" else for_steering(tasks)
    processes = 1 if kind == "driver" else max(min(options.concurrency, tasks), 1)
    return math.ceil(options.rate_limit / processes)


def _slow_seconds(context: RestoreContext) -> float:
    """What a limit adds to a download or an upload at most: all those under way at once share it at a store."""
    options = context.options
    if not options.rate_limit:
        return 0.0
    return options.concurrency * max((part.file.size for part in context.todo), default=0) / options.rate_limit


def put(context: RestoreContext) -> None:
    """Read every part and put its rows."""
    job = PutJob(context.options.cluster, context.backup.api_version, context.backup.store, context.record)
    _run(context, partial(put_part, job))


def _run(context: RestoreContext, bring: Callable[[FilePart, TaskContext], Brought]) -> None:
    parts = context.todo
    context.session_seconds = run_tasks(
        parts,
        bring,
        options=context.options.executor,
        on_result=context.took,
        name_of=str,
        reporter=context.reporter,
        expected_task_bytes=sum(part.file.total_bytes for part in parts) // max(len(parts), 1),
    )
