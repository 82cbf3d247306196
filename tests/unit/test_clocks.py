"""This machine's clock is not asked about anything that comes from a cluster or a file, except by `tikv_br.cluster.clock`."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.support.tools import ROOT

STAMP = "a time in a record or an answer that this process writes, of what it does"
TEXT = "for people, in a sentence or a column: no decision"
REASONS = {
    "archive/compact.py": (1, STAMP),
    "archive/maintenance.py": (3, f"two: {STAMP}; `log status` knows no PD, and says whose clock its lag is by"),
    "archive/writer.py": (1, STAMP),
    "backup/dated.py": (
        1,
        "the name of a new folder; an unfinished one is continued for some hours, or a new one is begun",
    ),
    "backupset/backup_writer.py": (1, STAMP),
    "backupset/lease.py": (
        3,
        "the end of our own lease, for people and for machines that agree with the storage's clock"
        "; "
        "one: a lease has expired only if the storage's clock says so as well; one: " + TEXT,
    ),
    "backupset/prune.py": (
        1,
        "a backup from the future is kept; a clock that is off removes less, as the storage's time counts too",
    ),
    "cli/changefeed_cmd.py": (1, STAMP),
    "cli/key_flags.py": (1, "an age on the command line of a command that knows no PD"),
    "cli/log.py": (3, "the times of log lines, which logging has taken"),
    "cli/shared.py": (1, STAMP),
    "cli/show_cmd.py": (1, "`cat` prints a value in any case; it says by whose clock the value has expired"),
    "cluster/clock.py": (6, "compares this machine's clock with PD's"),
    "cluster/timestamps.py": (2, "one: " + TEXT + "; one: an age on the command line of a command that knows no PD"),
    "dataflow/run.py": (1, STAMP),
    "drill/backups.py": (1, "the end of a drill's writes if the source has no timestamps; the report names the clock"),
    "drill/context.py": (1, STAMP),
    "drill/history.py": (1, "a report from the future does not count"),
    "drill/run.py": (1, "the name of a drill"),
    "export/run.py": (2, STAMP),
    "gc/watch.py": (1, STAMP),
    "incremental/group/capture.py": (1, STAMP),
    "incremental/group/owner.py": (1, STAMP),
    "incremental/group/worker.py": (1, STAMP),
    "incremental/pipeline.py": (1, STAMP),
    "incremental/sinks/open.py": (1, STAMP),
    "incremental/sync.py": (1, STAMP),
    "incremental/watch/server.py": (1, STAMP),
    "report/draft.py": (1, STAMP),
    "restore/resume.py": (1, STAMP),
    "retry.py": (3, "the time in a log line, by the clock of that line"),
    "serve/watcher.py": (2, "when a place was read, and how old what was read is: " + TEXT),
    "serve/web.py": (1, TEXT),
    "storage/credentials.py": (1, "the end of credentials that this process has just been given"),
    "storage/local.py": (1, "what killed writers have left is removed after a day, by a file system of this machine"),
}
"""Modules that ask this machine's clock, how often, and why they may."""
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.ctime"}
OF_NOW = {"time.gmtime", "time.localtime", "time.strftime", "time.asctime"}
"""Without a time as argument they mean now."""


def uses_of(tree: ast.AST) -> int:
    """How often a module asks for the time of day, or passes on what does."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ".".join(ast.unparse(node).split(".")[-2:])
            found += name in CLOCKS | OF_NOW
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
            assert not {each.name for each in node.names} & {"time_ns", "gmtime", "localtime", "strftime"} - {"time"}
            assert node.module != "time"
    return found


def test_this_machines_clock_is_asked_for_a_reason_only() -> None:
    """What comes from a cluster or a file is judged by PD's clock, the storage's or the recorded one: each other use is listed."""
    found = Counter[str]()
    for folder in (ROOT / "tikv_br", ROOT / "incremental", ROOT / "formats"):
        for path in folder.rglob("*.py"):
            name = path.relative_to(ROOT / "tikv_br" if folder.name == "tikv_br" else ROOT).as_posix()
            if not name.startswith(("playground/", "cluster/pb/")) and not _is_linked(path):
                found[name] += uses_of(ast.parse(path.read_text(encoding="utf-8")))
    assert {name: count for name, count in found.items() if count} == {
        name: count for name, (count, _why) in REASONS.items() if count
    }


def test_a_new_use_is_found() -> None:
    """In every form in which Python tells the time."""
    text = "import time, datetime\nnow = time.time\nfor each in (datetime.datetime.now(), datetime.date.today(), time.gmtime()): pass"
    assert uses_of(ast.parse(text)) == 4


def _is_linked(path: Path) -> bool:
    return any(part.is_symlink() for part in path.parents)
