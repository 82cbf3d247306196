"""A folder for each run: names, and which run is resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tikv_br.backup.dated import RESUMED_FOR, LastRun, Subject, dated_location
from tikv_br.backupset import layout
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Notice, silent
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse


def here(folder: Path, name: str = "full-{time}") -> StorageLocation:
    """A template below a folder."""
    return parse(f"local://{folder}/{name}")


def test_the_time_of_the_start_is_the_name(tmp_path: Path) -> None:
    """In UTC; a path without {time} is as it was, and a dry run leaves no trace."""
    found = dated_location(here(tmp_path / "backups"), silent, dry_run=True)
    assert re.fullmatch(r"full-20\d\d-\d\d-\d\dT\d{6}Z", Path(found.path).name)
    assert Path(found.path).parent == tmp_path / "backups"
    assert not list(tmp_path.iterdir())
    assert dated_location(here(tmp_path, "monday"), silent, dry_run=False) == here(tmp_path, "monday")
    with pytest.raises(UsageError, match="last part"):
        dated_location(here(tmp_path, "{time}/full"), silent, dry_run=False)


def test_the_name_has_what_distinguishes_backups(tmp_path: Path) -> None:
    """Keyspaces, ranges and kinds with one path get folders of their own, and do not continue each other's run."""
    subjects = [
        Subject(("a:1",)),
        Subject(("b:1",)),
        Subject(("a:1",), keyspaces=("features",)),
        Subject(("a:1",), keyspaces=("billing", "7")),
        Subject(("a:1",), kind="txn", keyspaces=("features",)),
        Subject(("a:1",), kind="incremental"),
        Subject(("a:1",), ranges=(KeyRange(b"a", b"b"),)),
        Subject(("a:1",), ranges=(KeyRange(b"a", b"c"),)),
    ]
    names = []
    for each in subjects:
        found = dated_location(here(tmp_path, "{time}"), silent, dry_run=False, subject=each)
        names.append(Path(found.path).name.partition("Z")[2])
        open_store(found).put(layout.RUN, b"{}")
        assert dated_location(here(tmp_path, "{time}"), silent, dry_run=False, subject=each) == found
    assert names[:6] == ["", "", "-features", "-billing+7", "-features-txn", "-incremental"]
    assert len(set(names)) == 7  # two clusters differ in their notes only
    assert len([*tmp_path.rglob("dated/*.json")]) == len(subjects)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{keyspace}-{date}", r"features-20\d\d-\d\d-\d\d"),
        ("{time:%Y%m%d_%H%M}-{keyspace}", r"20\d{6}_\d{4}-features"),
        ("{keyspace}", "features"),
        ("x{date}", r"x20\d\d-\d\d-\d\d-features"),
    ],
)
def test_placeholders(tmp_path: Path, template: str, expected: str) -> None:
    """The keyspace is not repeated; formats are those of strftime."""
    found = dated_location(here(tmp_path, template), silent, dry_run=True, subject=Subject(keyspaces=("features",)))
    assert re.fullmatch(expected, Path(found.path).name)


@pytest.mark.parametrize("template", ["{when}", "full-%Y-%m-%d", "{time:%Y/%m}", "{time}/full", "{time:%n}"])
def test_what_is_no_name_is_refused(tmp_path: Path, template: str) -> None:
    """Unknown placeholders, formats outside of braces, and names of several folders."""
    with pytest.raises(UsageError):
        dated_location(here(tmp_path, template), silent, dry_run=False)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_is_continued_for_some_hours(tmp_path: Path) -> None:
    """A finished one is not, nor one of another template or of yesterday, whose folder a notice names."""
    template, reported = here(tmp_path), list[Event]()
    first = dated_location(template, reported.append, dry_run=False)
    assert dated_location(here(tmp_path, "{time}"), reported.append, dry_run=False) != first
    assert reported == []
    open_store(first).put(layout.RUN, b"{}")
    (note,) = [path for path in tmp_path.rglob("dated/*.json") if first.path.rpartition("/")[2] in path.read_text()]
    name = str(note.relative_to(tmp_path))
    root = open_store(parse(f"local://{tmp_path}"))
    last = read_record(root, LastRun, name)
    earlier = replace(last, started_ms=last.started_ms - (RESUMED_FOR - 60) * 1000)
    write_record(root, name, earlier)
    assert dated_location(template, reported.append, dry_run=False) == first
    write_record(root, name, replace(last, started_ms=last.started_ms - RESUMED_FOR * 1000 - 1))
    dated_location(template, reported.append, dry_run=False)
    assert [isinstance(each, Notice) and first.path in each.message for each in reported] == [True, True]
    assert read_record(root, LastRun, name).started_ms >= last.started_ms
    open_store(first).delete(layout.RUN)
    dated_location(template, reported.append, dry_run=False)
    assert len(reported) == 2
