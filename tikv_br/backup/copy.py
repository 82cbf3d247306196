"""Runs the tasks of the chosen engine, on the driver's side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tikv_br.backup.store import run_store_task
from tikv_br.cluster import versions
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.dataflow.plan import Interval
from tikv_br.dataflow.run import BackupContext
from tikv_br.dataflow.steps import run_backup_tasks
from tikv_br.dataflow.write import BackupJob


def copy(context: BackupContext) -> None:
    """Copy all intervals of the plan. Raises the first error of a task."""
    copy_intervals(context, context.plan)


def copy_intervals(context: BackupContext, plan: Sequence[Interval]) -> None:
    """Copy intervals. Raises the first error of a task."""
    options, engine = context.options, context.engine
    rate_limit = RateLimit(options.rate_limit).share(engine.executor, engine.slots, len(plan))
    job = BackupJob(
        context.first_run,
        options,
        context.conversion,
        rate_limit,
        engine.rewrites_files,
        all(versions.supports(store.version, versions.EXPIRY_PROPERTIES) for store in context.info.stores),
        context.snapshot,
    )
    if engine.name == "store":
        run_task = run_store_task
    else:
        from tikv_br.backup.scan import run_scan_task as run_task  # loads Arrow and numpy: after the checks
    run_backup_tasks(context, plan, partial(run_task, job))
