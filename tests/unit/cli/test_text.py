"""Figures and tables as people read them."""

from __future__ import annotations

import pytest

from tikv_br.cli.backups_cmd import COLUMNS as BACKUPS
from tikv_br.cli.backups_cmd import DROP
from tikv_br.cli.output import human_bytes, human_seconds, pairs, table


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes(count: int, text: str) -> None:
    """Bytes grow through the units and stay in the last."""
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.123, "0.12s"), (12.34, "12.3s"), (245, "4m05s"), (7380, "2h03m"), (59.99, "60.0s")]
)
def test_seconds(seconds: float, text: str) -> None:
    """Seconds become minutes and hours."""
    assert human_seconds(seconds) == text


COLUMNS = ("id", "finished", "kvs", "path")
ROWS = [
    ("20261123T204452-0f3a91", "2026-11-23 20:44:52 UTC (4 min ago)", "1,000,000", "nightly/2026-11-23"),
    ("20261122T204450-77ab02", "2026-11-22 20:44:50 UTC (24 h ago)", "999,999", "nightly/2026-11-22"),
]
PROBES = [
    (
        "gc",
        "warn",
        "the GC safe point is 30 h old; tikv-br-sync-east holds it back",
        "Remove it if it is no longer used.",
    ),
    ("clock", "ok", "0.1 s apart", ""),
]


def test_table_is_aligned_without_trailing_blanks() -> None:
    """Columns start at the same place in every line, and nothing wraps without a limit."""
    assert table(("a", "bb"), [("ccc", "d"), ("e", "")]) == "a    bb\nccc  d\ne"
    assert len(table(COLUMNS, [ROWS[0]]).splitlines()) == 2


def test_a_wide_terminal_has_all_columns() -> None:
    """140 columns hold them."""
    assert table(COLUMNS, ROWS, 140, drop=("path", "kvs")) == (
        "id                      finished                             kvs        path\n"
        "20261123T204452-0f3a91  2026-11-23 20:44:52 UTC (4 min ago)  1,000,000  nightly/2026-11-23\n"
        "20261122T204450-77ab02  2026-11-22 20:44:50 UTC (24 h ago)   999,999    nightly/2026-11-22"
    )


def test_eighty_columns_leave_some_out_and_say_so() -> None:
    """Ids are whole; the note names what is not shown."""
    assert table(COLUMNS, ROWS, 80, drop=("path", "kvs")) == (
        "id                      finished                             kvs\n"
        "20261123T204452-0f3a91  2026-11-23 20:44:52 UTC (4 min ago)  1,000,000\n"
        "20261122T204450-77ab02  2026-11-22 20:44:50 UTC (24 h ago)   999,999\n"
        "(not shown: path; they need a wider terminal or --output json)"
    )


def test_forty_columns_are_a_list_of_lines() -> None:
    """Each row is stacked, without its empty cells; words longer than a line stay whole."""
    assert table(COLUMNS, ROWS, 40, drop=("path", "kvs")).splitlines()[:6] == [
        "id        20261123T204452-0f3a91",
        "finished  2026-11-23 20:44:52 UTC (4 min",
        "          ago)",
        "kvs       1,000,000",
        "path      nightly/2026-11-23",
        "",
    ]
    assert "status  ok\nresult  0.1 s apart" in table(("probe", "status", "result", "to do"), PROBES, 40).replace(
        "probe   clock\n", ""
    )


def test_prose_wraps_within_its_column() -> None:
    """The widest column gives way first, and only at words: a service's name is never cut."""
    shown = table(("probe", "status", "result", "what to do"), PROBES, 80, prose=("result", "what to do"))
    assert shown == (
        "probe  status  result                           what to do\n"
        "gc     warn    the GC safe point is 30 h old;   Remove it if it is no longer\n"
        "               tikv-br-sync-east holds it back  used.\n"
        "clock  ok      0.1 s apart"
    )


@pytest.mark.parametrize("width", range(10, 140, 7))
def test_no_cell_is_ever_cut(width: int) -> None:
    """Whatever the width, what is shown is shown whole, and only words that are longer than a line exceed it."""
    shown = table(("probe", "status", "result", "to do"), PROBES, width, prose=("result", "to do"))
    longest = max(len(word) for word in shown.split())
    assert all(word in shown for row in PROBES for cell in row for word in cell.split())
    assert all(len(line) <= max(width, longest + len("status  ")) for line in shown.splitlines())


def test_pairs_wrap_below_their_beginning() -> None:
    """Long values continue below themselves; a name that leaves no room has its value on the next line."""
    rows = [("total-kv", "5"), ("engine", "scan (the stores do not have what backup by stores needs)")]
    assert pairs(rows, 40, indent=2) == (
        "  total-kv  5\n  engine    scan (the stores do not have\n            what backup by stores needs)"
    )
    assert pairs([("scan_window_seconds", "4.21s")], 30) == "scan_window_seconds\n  4.21s"


def test_list_keeps_the_path_at_80_columns() -> None:
    """The path is what other commands take: figures give way first."""
    row = (
        "20261128T0210-abcdef",
        "2026-11-28 02:10:00",
        "v1ttl → v2",
        "default, features",
        "1,234,567",
        "12.5 GiB",
        "3.1 GiB",
        "461",
        "scan",
        "yes",
        "2026/nov/28",
    )
    lines = table(BACKUPS, [row], 80, drop=DROP).splitlines()
    assert "path" in lines[0].split()
    assert row[-1] in lines[1]
    assert max(map(len, lines)) <= 80
