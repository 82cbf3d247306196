"""Answers of stores that were asked to open a storage."""

from __future__ import annotations

import pytest

from tikv_br.check.probe import ProbeSkipped, Status
from tikv_br.check.storage_probes import judge_answers

NOT_BUILT_IN = 'Io(Custom { kind: NotFound, error: "bad storage backend " })'
"""Recorded, as is the next one."""
NO_FOLDER = 'Io(Os { code: 2, kind: NotFound, message: "No such file or directory" })'


def test_all_stores_open_it() -> None:
    """The outcome has the number of stores."""
    outcome = judge_answers({"store 1": "", "store 4": ""}, "gcs")
    assert (outcome.status, outcome.seen) == (Status.OK, "opened by 2 stores")


@pytest.mark.parametrize(
    ("error", "scheme", "advice"),
    [
        (NOT_BUILT_IN, "gcs", "built without gcs"),
        (NO_FOLDER, "local", "same shared directory"),
        ("Other(no credentials)", "azure", "Check the credentials"),
    ],
)
def test_a_store_that_does_not(error: str, scheme: str, advice: str) -> None:
    """The outcome quotes the store; the advice fits the storage, and names what works without stores."""
    outcome = judge_answers({"store 1": "", "store 4": error}, scheme)
    assert (outcome.status, outcome.seen) == (Status.WARN, f"store 4 cannot open it: {error}")
    assert advice in outcome.advice
    assert "--engine scan" in outcome.advice


def test_no_store_answers() -> None:
    """Another probe reports that."""
    with pytest.raises(ProbeSkipped):
        judge_answers({}, "gcs")
