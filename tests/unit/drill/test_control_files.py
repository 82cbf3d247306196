"""Control files that others have changed: whatever cleans up, what is pinned or lies outside is untouched."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.damage import read_objects
from tests.unit.backupset.shelves import index_at, shelve
from tests.unit.drill.samples import NoHost, passed
from tikv_br.backupset.index import removal_name
from tikv_br.backupset.prune import execute, plan
from tikv_br.backupset.rebuild import rebuild
from tikv_br.backupset.removal import Removal
from tikv_br.backupset.retention import Policy
from tikv_br.drill.history import backup_path, read_past_drills, remove_old_drills
from tikv_br.drill.ledger import BackupRemover, Cleaner, Creation, EntryKind, Ledger
from tikv_br.drill.playground import MARK, PlaygroundTarget
from tikv_br.drill.report import write_json
from tikv_br.errors import TikvBrError
from tikv_br.records import dump
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

EXAMPLES = 100 if settings.get_profile("thorough").max_examples == settings().max_examples else 20
PINNED, VICTIM = "pinned", "victim"
numbers = itertools.count()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    """Changes for all tests of the module."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch) -> Path:
    """Backups, one of them pinned, a home of drills with reports and a ledger, and directories of others beside them."""
    folder = tmp_path_factory.mktemp("model")
    monkeypatch_module.setattr(
        os, "fsync", lambda _file: None
    )  # power loss is not simulated, and it takes most of the time
    index = index_at(folder / "backups")
    entries = [shelve(index, name, day) for day, name in enumerate(("old", PINNED, "new"))]
    index.pin(entries[1])
    gone = Removal(entries[0].id, "old", (), ("sst/a.sst",))
    index.root.put(removal_name(gone.id), dump(gone))
    home = open_store(parse(str(folder / "home")))
    for number in (1, 2):
        write_json(home, passed(number))
    ledger = Ledger(home, "one")
    place = folder / VICTIM / "drill-one-01234567"
    (place / "cluster").mkdir(parents=True)
    (place / MARK).write_text("one")
    (folder / VICTIM / "file").write_text("precious")
    for creation in (
        Creation(EntryKind.COPY, "copies/one"),
        Creation(EntryKind.PLAYGROUND, str(place), socket.gethostname()),
        Creation(EntryKind.BACKUP, f"local://{folder}/backups/{backup_path('one')}"),
    ):
        ledger.add(creation)
    return folder


def clean_up_all(folder: Path) -> None:
    """Everything that removes something by what files say."""
    index, home = index_at(folder / "backups"), open_store(parse(str(folder / "home")))
    backups = parse(str(folder / "backups"))
    cleaner = Cleaner(
        home,
        {
            EntryKind.PLAYGROUND: PlaygroundTarget(NoHost(), folder / "work"),
            EntryKind.BACKUP: BackupRemover(backups, None),
        },
    )
    steps: tuple[Callable[[], object], ...] = (
        cleaner.clean_earlier,
        lambda: remove_old_drills(home, index.root, read_past_drills(home), 1),
        lambda: execute(index, plan(index, Policy(last=1))),
        lambda: rebuild(index),
    )
    for step in steps:
        with contextlib.suppress(TikvBrError):
            step()


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changed_control_files_remove_nothing_that_is_pinned_or_elsewhere(model: Path, data: st.DataObject) -> None:
    """One record is replaced by another one, or by itself with other ids, paths or bytes; then all clean-ups run."""
    folder = model.parent / f"try-{next(numbers)}"
    shutil.copytree(model, folder)
    try:
        objects = read_objects(folder)
        kept = {name: content for name, content in objects.items() if name.startswith((f"backups/{PINNED}/", VICTIM))}
        records = sorted(
            name for name in objects.keys() - kept.keys() if name.endswith((".json", "backupmeta", "backup.lock"))
        )
        name = data.draw(st.sampled_from(records))
        content = objects[data.draw(st.sampled_from(sorted(objects)))] if data.draw(st.booleans()) else objects[name]
        for old, new in data.draw(
            st.lists(
                st.tuples(
                    st.sampled_from((b"old", b"new", b"one", b"drill")),
                    st.sampled_from((b"pinned", b"../victim", b"", b"victim")),
                ),
                max_size=2,
            )
        ):
            content = content.replace(old, new)
        if content and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(content) - 1))
            content = content[:at] + data.draw(st.binary(max_size=4)) + content[at + 1 :]
        (folder / name).write_bytes(content)
        clean_up_all(folder)
        now = read_objects(folder)
        assert {each: now.get(each) for each in kept} == kept
    finally:
        shutil.rmtree(folder)
