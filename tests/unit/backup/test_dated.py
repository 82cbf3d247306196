"""A folder for each run: names, and which run is resumed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tikv_br.backup.dated import RESUMED_FOR, LastRun, dated_location
from tikv_br.backupset import layout
from tikv_br.backupset.sealed import read_record, write_record
from tikv_br.errors import UsageError
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
