"""``tikv-br drill`` as cron runs it: no terminal, nothing in the environment but a minimal PATH, all of it in a config file."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import PROGRAM, environment, succeed, tikv_br
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.formats.api_version import ApiVersion

KEYS = 500
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster with some rows."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as running:
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
on-end = "touch {tmp_path}/ended"
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


@pytest.mark.core("drill")
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
    assert len(list((tmp_path / "backups").glob("*/backupmeta"))) == 1

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
    assert (tmp_path / "ended").exists()
    assert "tikv_br_drill_success" in (tmp_path / "drill.prom").read_text()
    assert "write the report: done" in (tmp_path / "drill.log").read_text()
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.core("report")
def test_the_mail_of_a_failed_drill_has_reason_and_report(config: Path, tmp_path: Path) -> None:
    """Error, hint and report in two lines, with the exit code of the failure: there is no backup."""
    line = here(crontab()[1], tmp_path) + " --backup newest"
    done = as_cron(line, tmp_path)
    assert (done.returncode, done.stdout) == (31, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("Error: ")
    [page] = (tmp_path / "drills" / "reports").glob("*.html")
    assert hint.endswith(f"Report: local://{page}")


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


def test_a_point_in_time_from_a_config_file(live: LiveCluster, config: Path, tmp_path: Path) -> None:
    """As cron runs it, with a log that is being written; a variable of the environment stands for the time."""
    folder = f"local://{tmp_path}"
    backup = ("backup", "raw", "--pd", live.pd, "--storage", f"{folder}/backups/first", "--safe-interval", "0s")
    succeed(*backup, "--executor", "driver")
    log = ("log", "start", "--pd", live.pd, "--storage", f"{folder}/log", "--from-backup", f"{folder}/backups/first")
    follow = [str(PROGRAM), *log, "--flush-interval", "200ms", "--hold-back", "0s", "--quiet"]
    raw, pd = live.raw(), live.cluster.pd

    def window_end() -> int:
        live.flush(live.store_ids[0])
        shown = tikv_br("show", "--storage", f"{folder}/backups/first", "--log", f"{folder}/log", "--output", "json")
        return int(shown.last["window_end"]) if shown.code == 0 else 0

    with subprocess.Popen(follow, env=environment(), cwd="/") as process:
        try:
            start = pd.tso()  # the log knows all versions once it follows the stores
            eventually(lambda: window_end() > start, PATIENCE)
            raw.put(b"key00000", b"wrong")
            raw.put(b"more", b"wrong")
            ts = pd.tso()
            live.flush(live.store_ids[0])  # or what follows could get an older timestamp
            raw.put(b"key00000", b"value" * 20)
            raw.delete(b"more")
            eventually(lambda: window_end() > ts, PATIENCE)
        finally:
            process.terminate()
            process.wait(PATIENCE)
    with config.open("a", encoding="utf-8") as file:
        file.write(f'scenario = "point-in-time"\nbackup = "newest"\nlog = "{folder}/log"\nwithin = "1h"\nseed = 5\n')
    done = as_cron(f"30 4 * * * {PROGRAM} drill run --config {config} --quiet", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [listed] = succeed("drill", "list", "--config", str(config), "--output", "json").lines
    assert (listed["verdict"], listed["scenario"]) == ("passed", "point-in-time")
    point = succeed("drill", "show", "--config", str(config), "--output", "json").last["report"]["point"]
    assert (point["seed"], point["first_ts"] <= point["restore_ts"] <= point["last_ts"]) == (5, True)
    config.write_text(config.read_text().replace('within = "1h"\n', ""), encoding="utf-8")
    again = tikv_br("drill", "run", "--config", str(config), "--output", "json", TIKV_BR_DRILL_RUN_RESTORE_TS=str(ts))
    assert again.code == 0, again.err
    assert (again.last["restore_ts"], again.last["keys"]) == (ts, KEYS + 1)


def test_a_drill_that_is_not_there_is_said_so(config: Path) -> None:
    """An empty home lists nothing, and shows nothing."""
    assert tikv_br("drill", "list", "--config", str(config)).code == 0
    assert tikv_br("drill", "show", "2026", "--config", str(config)).code == 31
