"""Steps that choose the timestamp of ingested rows, and announce the ingest to followers of the cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tikv_br import run_id
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.ingest_announcer import Announcer, foreign_followers, own_followers, unfinished
from tikv_br.cluster.timestamps import seconds_between, show_ts
from tikv_br.errors import (
    ClusterFollowed,
    ClusterUnreachable,
    EtcdUnreachable,
    RetryBudgetExhausted,
    TikvBrError,
    TimestampAheadOfTso,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Notice
from tikv_br.restore.context import RestoreContext
from tikv_br.restore.options import Restamp
from tikv_br.restore.target import check_target

log = logging.getLogger(__name__)


def check_timestamps(context: RestoreContext) -> None:
    """Find out whether rows need a new timestamp: deletes in the target may be newer, or they are newer than its TSO (API V2)."""
    if context.backup.api_version is not ApiVersion.V2 or not context.todo:
        return
    if context.restamp_ts:  # a resumed restore keeps the timestamp that it has chosen
        context.restamp_reason = "as before the interruption"
        return
    newest = max((facts.max_ts for facts in context.facts.values()), default=0)
    now = context.cluster.pd.tso() if newest else 0
    ahead = f"the backup's newest row has ts {newest}, {seconds_between(now, newest):.1f} s ahead of the target's TSO"
    match context.options.restamp:
        case Restamp.ALWAYS:
            context.restamp_reason = "--restamp always"
        case Restamp.AUTO if context.backup.cluster_id == context.info.cluster_id:
            context.restamp_reason = (
                "the backup is of this cluster, and deletes since then would hide rows with their own timestamps"
                if context.options.command != "load raw"
                else "deletes of the same keys in the target may be newer than the loaded files, and would hide rows"
            )
        case Restamp.AUTO if newest > now:
            context.restamp_reason = ahead
        case Restamp.NEVER if newest > now:
            raise TimestampAheadOfTso(ahead)
        case _:
            return
    if context.options.dry_run:
        _choose_timestamp(context)


def check_followers(context: RestoreContext) -> None:
    """Refuse a target with followers that would not learn of the rows. Raises `ClusterFollowed`.

    Those that read announcements do; but if rows keep their timestamps, all that they can do is end.
    """
    if not _is_announced(context):
        return
    if not context.restamp_reason and (ended := own_followers(context.cluster)):
        context.reporter(
            Notice(
                "rows keep their timestamps, so that no change feed delivers them, and these followers of the cluster will end degraded "
                f"(exit code 76): {', '.join(ended)}. With --restamp always they get the rows"
            )
        )
    if context.options.allow_followers:
        return
    if found := foreign_followers(context.cluster):
        raise ClusterFollowed(
            f"rows that stores ingest reach no change feed, and these followers of the cluster would not notice: {', '.join(found)}"
        )


def report_followers(context: RestoreContext) -> None:
    """Report that followers, because of which an ingest would be refused, get rows that are put."""
    if _is_announced(context):
        notice_followers(context, foreign_followers, "followers of the cluster get these rows, as they are put")


def notice_followers(context: RestoreContext, find: Callable[[Cluster], Iterable[str]], text: str) -> None:
    """Report the followers that `find` finds. It is only a notice: if the cluster cannot tell them, nothing fails."""
    try:
        found = list(find(context.cluster))
    except TikvBrError as error:
        log.debug("cannot look for followers: %s", error.message)
        return
    if found:
        context.reporter(Notice(f"{text}: {', '.join(found)}"))


def _is_announced(context: RestoreContext) -> bool:
    """Return whether followers can exist: only API V2 has change feeds."""
    return context.backup.api_version is ApiVersion.V2 and bool(context.todo)


def announce(context: RestoreContext) -> None:
    """Announce the ingest to followers of the cluster, then choose the new timestamp: see `tikv_br.cluster.ingests`."""
    if not _is_announced(context):
        return
    restore_id = context.record.id if context.record is not None else run_id.current_or_new()
    spans = [each.target for each in context.wanted]
    context.announcer = Announcer.start(context.cluster, context.options.command, restore_id, spans)
    if context.restamp_reason and not (context.restamp_ts and context.announcer.found_unfinished):
        _choose_timestamp(context)
        check_target(context)


def _choose_timestamp(context: RestoreContext) -> None:
    context.restamp_ts = new_timestamp(context)
    context.reporter(Notice(f"all rows get the new timestamp {show_ts(context.restamp_ts)}: {context.restamp_reason}"))


def finish_announcement(context: RestoreContext) -> None:
    """Announce that all rows are in; also for an earlier run that was killed before it could."""
    if context.announcer is not None:
        try:
            context.announcer.finish()
        except (ClusterUnreachable, RetryBudgetExhausted, EtcdUnreachable) as error:
            error.hint = "All rows are in the target. Left to do: followers of the cluster wait for the announcement of its end. Run the same command again once PD answers; it restores nothing twice."
            raise
    elif context.backup.api_version is ApiVersion.V2 and context.record is not None:
        found = context.cluster.ingests.read()
        if unfinished(found, context.record.id) is not None:
            Announcer.start(context.cluster, context.options.command, context.record.id, ()).finish()


def abandon_announcement(context: RestoreContext) -> None:
    """Withdraw the announcement after a failure, unless files may have been ingested."""
    announcer, context.announcer = context.announcer, None
    if announcer is not None:
        announcer.abandon()


def new_timestamp(context: RestoreContext) -> int:
    """A timestamp above all finished writes and below all later ones: the stores drop their cached timestamps.

    A check of the target after this sees every row that an ingest with it could hide.
    """
    ts = context.cluster.pd.tso()
    if not context.options.dry_run:
        flush_timestamps(context)
    return ts


def flush_timestamps(context: RestoreContext) -> None:
    """Make the stores drop cached timestamps, which may be older than the restored rows."""
    if context.backup.api_version is ApiVersion.V2:
        context.cluster.flush_timestamps()
