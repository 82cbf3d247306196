from __future__ import annotations

import pytest

from tikv_br.drill.objectives import Measured, Objectives, judge


@pytest.mark.parametrize(
    ("asked", "found", "missed"),
    [
        (Objectives(), Measured(), set()),
        (Objectives(rto=10), Measured(rto=10), set()),
        (Objectives(rto=10), Measured(rto=10.1), {"RTO"}),
        (Objectives(rto=10, rpo=5), Measured(), {"RTO", "RPO"}),
        (Objectives(min_keys=3), Measured(keys=3), set()),
        (Objectives(min_keys=3), Measured(keys=2), {"keys"}),
        (Objectives(max_age=1), Measured(age=2), {"backup age"}),
    ],
)
def test_a_limit_is_met_at_the_limit_and_missed_by_what_was_not_measured(
    asked: Objectives, found: Measured, missed: set[str]
) -> None:
    """Times are met from below and keys from above; a figure that nobody measured meets no limit."""
    assert {goal.name for goal in judge(asked, found) if not goal.met} == missed
