"""``tikv-br check`` as a user and as Nagios run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import tikv_br
from tests.e2e.conftest import Playgrounds

NOWHERE = ("--pd", "127.0.0.1:1", "--timeout", "60s", "--executor", "driver")


@pytest.mark.core("check")
def test_a_sound_cluster(playgrounds: Playgrounds, tmp_path: Path) -> None:
    """Exit code 0, a JSON line each probe with its fields, and a summary that adds up."""
    place = ("--storage", f"local://{tmp_path}")
    done = tikv_br(
        "check", "--pd", playgrounds["v2"], *place, "--timeout", "60s", "--executor", "driver", "--output", "json"
    )
    assert done.code == 0, done.out
    probes = done.lines[:-1]
    assert {line["message_type"] for line in probes} == {"probe"}
    assert all(line.keys() > {"name", "status", "seen", "advice", "figures", "seconds"} for line in probes)
    assert done.last["message_type"] == "summary"
    assert sum(done.last[status] for status in ("ok", "warn", "fail", "skipped")) == len(probes) > 20
    assert done.last["fail"] == 0


def test_people_get_a_table(playgrounds: Playgrounds) -> None:
    """One row a probe, and the counts."""
    done = tikv_br("check", "--pd", playgrounds["v2"], "--timeout", "60s", "--executor", "driver")
    assert done.code == 0, done.out
    rows = done.out.splitlines()
    assert rows[0].split() == ["probe", "status", "result", "what", "to", "do"]
    assert rows[-1].endswith("skipped")


def test_failed_probes_have_their_exit_code() -> None:
    """The exit code is 61, after all results."""
    done = tikv_br("check", *NOWHERE)
    assert done.code == 61
    assert "1 of 13 probes failed: pd" in done.err
    assert "PD is not reachable" in done.out


def test_as_a_plug_in_of_nagios(playgrounds: Playgrounds) -> None:
    """One line, exit code 0 or 2, and 3 where nothing could be checked: whatever is wrong, nothing else is written."""
    well = tikv_br("check", "--nagios", "--pd", playgrounds["v2"], "--timeout", "60s", "--executor", "driver")
    dead = tikv_br("check", "--nagios", *NOWHERE)
    wrong = tikv_br("check", "--nagios", "--pd", "no address")
    assert (well.code, dead.code, wrong.code) == (0, 2, 3)
    for done, word in ((well, "OK"), (dead, "CRITICAL"), (wrong, "UNKNOWN")):
        assert done.out.startswith(f"TIKV-BR {word} - ")
        assert len(done.out.splitlines()) == 1
        assert done.err == ""
    assert "'clock'=" in well.out
