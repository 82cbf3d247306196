"""``tikv-br drill`` as cron runs it: no terminal, nothing in the environment but a minimal PATH, all of it in a config file."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.api_version import ApiVersion
from tests.e2e.command import PROGRAM, succeed, tikv_br
from tests.live_cluster import LiveCluster, live_cluster

KEYS = 500
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster with some rows."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=1) as running:
        running.raw().batch_put({b"key%05d" % number: b"value" * 20 for number in range(KEYS)})
        yield running


@pytest.fixture
def config(live: LiveCluster, tmp_path: Path) -> Path:
    """A config file that says all that a drill needs."""
    path = tmp_path / "drill.toml"
    path.write_text(
        f"""
[defaults]
pd = ["{live.pd}"]
storage = "{tmp_path}/backups"
reports = "{tmp_path}/drills"
log-file = "{tmp_path}/drill.log"

[drill.run]
executor = "driver"
safe-interval = "1s"
target-stores = 1
work-dir = "{tmp_path}/work"
min-keys = {KEYS}
rto = "1h"
textfile = "{tmp_path}/drill.prom"
on-end = "touch {tmp_path}/told"
""",
        encoding="utf-8",
    )
    return path


def crontab() -> list[str]:
    """The lines of the README's crontab that run something."""
    [block] = re.findall(r"```crontab\n(.*?)```", (PROJECT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for line in block.splitlines() if re.match(r"[\d*]", line)]


def here(line: str, folder: Path) -> str:
    """The line with the places of this test in the stead of the README's."""
    for place, ours in (
        ("/opt/tikv-br/bin/tikv-br", str(PROGRAM)),
        ("/etc/tikv-br", str(folder)),
        ("/var/lib/tikv-br", str(folder)),
        ("s3://bucket", str(folder)),
    ):
        line = line.replace(place, ours)
    return line


def as_cron(line: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of a line of a crontab as cron does."""
    command = line.strip().split(maxsplit=5)[5]
    assert not re.search(r"(?<!\\)%", command), "cron takes a bare % for the end of the line"
    bare = {"HOME": str(home), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh", "LOGNAME": "nobody"}
    if "PYTHONPATH" in os.environ:  # where the package is not installed from this very checkout
        bare["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return subprocess.run(
        ["/bin/sh", "-c", command.replace(r"\%", "%")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=bare,
        cwd="/",
        start_new_session=True,  # cron has no terminal
    )


def test_the_crontab_of_the_readme_makes_a_backup_and_a_drill(live: LiveCluster, config: Path, tmp_path: Path) -> None:
    """In cron's environment both lines exit 0 and write nothing that would be mailed; backup, log and reports are there."""
    backup, drill = crontab()
    (tmp_path / "backup.toml").write_text(
        f'[defaults]\npd = ["{live.pd}"]\nexecutor = "driver"\n[backup.raw]\nsafe-interval = "1s"\n', encoding="utf-8"
    )
    done = as_cron(here(backup, tmp_path), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [page] = tmp_path.glob("*.html")
    assert json.loads(page.with_suffix(".json").read_text())["summary"]["total_kvs"] == KEYS
    assert (tmp_path / "backups" / page.stem / "backupmeta").exists()

    printed = succeed("drill", "schedule", "--print", "crontab", "--for", str(config), "--on", "sunday").out
    assert printed.split() == here(drill, tmp_path).split()
    done = as_cron(here(drill, tmp_path), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [listed] = succeed("drill", "list", "--config", str(config), "--output", "json").lines
    assert (listed["verdict"], listed["keys"]) == ("passed", KEYS)
    report = succeed("drill", "show", "--config", str(config), "--output", "json").last["report"]
    assert [goal["value"] for goal in report["goals"] if goal["name"] == "keys"] == [KEYS]
    assert json.loads((tmp_path / "drills" / "reports" / f"{listed['id']}.json").read_text()) == report
    assert (tmp_path / "drills" / "index.html").exists()
    assert (tmp_path / "told").exists()
    assert "tikv_br_drill_success" in (tmp_path / "drill.prom").read_text()
    assert "write the report: done" in (tmp_path / "drill.log").read_text()
    assert not list((tmp_path / "work").iterdir())


def test_what_cron_mails_of_a_failed_drill_says_why_and_where_its_report_is(config: Path, tmp_path: Path) -> None:
    """Error, hint and report in two lines, and the exit code of what failed: there is no backup."""
    line = here(crontab()[1], tmp_path) + " --backup newest"
    done = as_cron(line, tmp_path)
    assert (done.returncode, done.stdout) == (31, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("Error: ")
    [page] = (tmp_path / "drills" / "reports").glob("*.html")
    assert hint.endswith(f"The report: local://{page}")


def test_a_missed_objective_and_a_wrong_one_have_exit_codes_of_their_own(config: Path) -> None:
    """Too many keys asked for: 62 and a report. A duration that is none, a range that is not asked for: 2 and none."""
    flags = ("drill", "run", "--config", str(config), "--output", "json")
    missed = tikv_br(*flags, "--min-keys", str(KEYS + 1))
    assert missed.code == 62
    assert missed.last["name"] == "ObjectivesMissed"
    assert tikv_br(*flags, "--rto", "soon").code == 2
    assert tikv_br(*flags, "--start", "00").code == 2
    assert tikv_br(*flags, "--scenario", "deleted-range").code == 2
    listed = tikv_br("drill", "list", "--config", str(config), "--output", "json").lines
    assert [each["verdict"] for each in listed] == ["missed"]


def test_a_drill_that_is_not_there_is_said_so(config: Path) -> None:
    """An empty home lists nothing, and shows nothing."""
    assert tikv_br("drill", "list", "--config", str(config)).code == 0
    assert tikv_br("drill", "show", "2026", "--config", str(config)).code == 31
