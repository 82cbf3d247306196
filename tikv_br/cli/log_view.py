"""Output about a log archive: its status, its segments, and the changes of a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tikv_br.backupset.coverage import shown_keyspaces
from tikv_br.cli.output import KeyForm, Output, human_bytes, human_seconds, label, quote
from tikv_br.cluster.timestamps import show_time, show_ts

if TYPE_CHECKING:
    from tikv_br.archive.lookup import KeyChange
    from tikv_br.archive.maintenance import LogStatus
    from tikv_br.archive.records import Segment

_LEVELS = {
    "meta": "meta (records and sizes; --level files or data reads the files)",
    "files": "files (checksums of all files)",
    "data": "data (all rows)",
}


def show_status(out: Output, found: LogStatus, level: str) -> None:
    """Write the status as of a `level` of checks."""
    fields = asdict(found)
    out.result("log_status", fields)
    del fields["keyspace_name"]
    shown = fields | {
        "keyspace_id": shown_keyspaces([found.keyspace_id], [found.keyspace_name]),
        "start_ts": show_ts(found.start_ts),
        "checkpoint_ts": show_ts(found.checkpoint_ts) if found.checkpoint_ts else "saved elsewhere",
        "end_ts": show_ts(found.end_ts),
        "restorable_ts": show_ts(found.restorable_ts),
        "scan_window_seconds": human_seconds(found.scan_window_seconds),
        "rpo_seconds": human_seconds(found.rpo_seconds),
        "size": human_bytes(found.size),
        "size_per_day": human_bytes(found.size_per_day),
        "level": _LEVELS[level],
    }
    out.pairs(
        [
            (label(name), ", ".join(value) or "-" if isinstance(value, tuple) else str(value))
            for name, value in shown.items()
        ]
    )


def show_segments(out: Output, segments: Sequence[Segment]) -> None:
    """Write a row for each segment."""
    rows = []
    for segment in segments:
        size = sum(file.size for file in segment.files)
        fields = {
            "name": segment.name,
            "range": str(segment.span),
            "from_ts": segment.from_ts,
            "to_ts": segment.to_ts,
            "files": len(segment.files),
            "rows": sum(file.total_kvs for file in segment.files),
            "size": size,
            "scan_windows": [[period.from_ts, period.to_ts] for period in segment.inexact],
        }
        out.result("log_segment", fields)
        scans = ", ".join(f"{show_ts(period.from_ts)} to {show_ts(period.to_ts)}" for period in segment.inexact)
        counts = (str(fields[name]) for name in ("range", "files", "rows"))
        rows.append((show_ts(segment.from_ts), show_ts(segment.to_ts), *counts, human_bytes(size), scans or "-"))
    out.table(("from", "to", "range", "files", "rows", "size", "not restorable"), rows, drop=("files", "size"))


def show_changes(out: Output, key: bytes, found: Sequence[KeyChange], value_form: KeyForm) -> None:
    """Write a row for each change of a key."""
    rows = []
    for each in found:
        change = "delete" if each.deleted else "put"
        fields = {"key": key.hex(), "ts": each.ts, "op": change, "value": each.value.hex()}
        out.result("log_change", fields | {"expire_ts": each.expire_ts})
        expires = show_time(each.expire_ts * 1000) if each.expire_ts else "-"
        rows.append((show_ts(each.ts), change, "-" if each.deleted else quote(each.value, value_form), expires))
    out.table(("time", "change", "value", "expires"), rows, drop=("expires",))
