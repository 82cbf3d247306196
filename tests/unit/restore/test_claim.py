"""When a drill claims the rows of a cluster that is not its own."""

from __future__ import annotations

import pytest

from tikv_br.cluster.config import ClusterConfig
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.restore.run import FIRST_CHANGE, restore_steps
from tikv_br.storage.url import parse


@pytest.mark.parametrize("mode", list(Mode))
def test_all_that_changes_the_target_comes_after_the_claim(mode: Mode) -> None:
    """The step at which a drill claims its target is there in every restore, before rows, regions and modes change."""
    options = RestoreOptions(ClusterConfig(pd=("127.0.0.1:1",)), parse("/somewhere"), mode=mode)
    names = [step.name for step in restore_steps(options)]
    claim = names.index(FIRST_CHANGE)
    changes = {"split and scatter", "put", "ingest", "enter import mode", "set the download limit"}
    assert changes.isdisjoint(names[:claim])
    assert {"check the target", "check every file"} <= set(names[:claim])
    assert changes & set(names[claim:])
