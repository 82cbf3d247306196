"""Every flag of ``tikv-br drill run`` through the command line itself: exit code, JSON, report, and its page in a browser."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page
from tests.support.documented import assert_documented
from tests.support.listener import Listener, listening
from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tests.support.logs import write_log
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cli.main import run as tikv_br
from tikv_br.drill.run import SCENARIOS
from tikv_br.drill.tail import Tail
from tikv_br.errors import BackupDamaged
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = {b"row%04d" % number: b"value" * 20 for number in range(400)}
SCRATCH = 7
SHARED = re.compile(
    r"--(s3\..*|gcs\..*|azblob\..*|crypter\..*|log-.*|spark-(archive|conf)|ca|cert|key|help|config|quiet|skip-version-check)"
)
"""Options that other commands have as well, and that are tried there."""
PLOTS = "[...document.querySelectorAll('svg[data-plot]')].map(plot => plot.dataset.plot)"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster that holds `ROWS`, in two regions."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1) as live:
        make_keyspaces(live, SCRATCH)
        live.raw().batch_put(ROWS)
        codec = live.raw().codec
        live.split(codec.bound(codec.rpc_key(b"row0100")))
        yield live


@pytest.fixture(scope="module")
def recovery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """An empty V2 cluster."""
    with live_cluster(tmp_path_factory.mktemp("recovery"), ApiVersion.V2, stores=1) as live:
        make_keyspaces(live, SCRATCH)
        yield live


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Run a listener."""
    with listening() as server:
        yield server


@pytest.fixture(scope="module")
def backups(source: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index and a backup of the source."""
    folder = tmp_path_factory.mktemp("backups")
    place = ("--storage", f"local://{folder}/first", "--safe-interval", "0s", "--executor", "driver")
    assert tikv_br(["backup", "raw", "--pd", source.pd, *place]) == 0
    return folder


class Drills:
    """Runs drills with a home of their own, and looks at what they write."""

    def __init__(self, home: Path, usual: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._usual = ("--reports", str(home), *usual)
        self._capsys = capsys

    def run(self, code: int, *flags: str) -> dict[str, Any]:
        """Run a drill that ends with a code; return the last line of its JSON."""
        arguments = ["drill", "run", *self._usual, *flags, "--output", "json"]
        self._capsys.readouterr()
        ended = tikv_br(arguments)
        said = self._capsys.readouterr()
        assert ended == code, said
        lines = [json.loads(line) for line in said.out.splitlines()]
        assert_documented(arguments, lines)
        last: dict[str, Any] = lines[-1]
        return last

    @property
    def newest(self) -> Path:
        """Page of the last drill. Ids of drills that started in the same second do not order them."""
        return max((self.home / "reports").glob("*.html"), key=lambda page: page.stat().st_mtime_ns)

    @property
    def report(self) -> dict[str, Any]:
        """The JSON beside it."""
        found: dict[str, Any] = json.loads(self.newest.with_suffix(".json").read_text())
        return found

    def seen(self, page: Page) -> str:
        """Open the page of the last drill: its scenario is described, its map drawn, and the browser reports no error."""
        page.go(self.newest.as_uri())
        page.wait("document.readyState === 'complete'")
        assert page.complaints == []
        assert {"timeline", "map"} <= set(page.value(PLOTS))
        text = page.text()
        assert re.search(f"Recovery drill( against an emulator)?: {self.report['verdict']}", text)
        assert SCENARIOS[self.report["scenario"]] in text
        assert "by the 2 regions of the source" in text
        return text


@pytest.fixture
def drills(source: LiveCluster, backups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Drills:
    """Drills with the newest backup of the folder."""
    usual = ("--pd", source.pd, "--storage", str(backups), "--backup", "newest", "--key-format", "raw")
    return Drills(tmp_path / "drills", usual, capsys)


@pytest.fixture(autouse=True)
def all_is_removed(source: LiveCluster) -> Iterator[None]:
    """No row outlasts a drill."""
    yield
    assert contents(source) == ROWS
    assert contents(source, SCRATCH) == {}


def test_all_that_can_be_asked_of_a_recovery_at_once(
    drills: Drills, source: LiveCluster, recovery: LiveCluster, listener: Listener, page: Page, tmp_path: Path
) -> None:
    """Backup, recovery cluster, tail, cut-over, objectives, retention, hooks: it passes, and all hooks run."""
    beat, hook, reported = tmp_path / "beat.url", tmp_path / "hook.url", tmp_path / "reported.json"
    beat.write_text(listener.url("beat").reveal() + "\n")
    hook.write_text(listener.url("hook").reveal() + "\n")
    script = tmp_path / "report.py"
    script.write_text(f"import json, os; json.dump(dict(os.environ), open({str(reported)!r}, 'w'))")
    summary = drills.run(
        0,
        *("--backup", "new", "--keyspace", "0", "--dst-api-version", "v2", "--safe-interval", "0s"),
        *("--executor", "driver", "--spark-master", "local[1]"),
        *(
            "--storage",
            str(tmp_path / "backups"),
            "--storage-patience",
            "30s",
            "--target",
            "cluster",
            "--target-pd",
            recovery.pd,
        ),
        *("--tail", "100ms", "--tail-lag", "1m", "--tail-patience", "2m", "--cut-over", "1h"),
        *("--rpo", "1h", "--rto", "1h", "--max-age", "1h", "--min-keys", str(len(ROWS)), "--keep-last", "1"),
        *("--heartbeat-url-file", str(beat), "--webhook-url-file", str(hook)),
        *("--textfile", str(tmp_path / "drill.prom"), "--on-end", f"{sys.executable} {script}"),
    )
    assert (summary["verdict"], summary["keys"], summary["missed"]) == ("passed", len(ROWS), [])
    assert summary["cut_over"] > 0
    assert sorted(path for _method, path, _body in listener.heard) == ["/beat", "/hook"]
    posted = next(json.loads(body) for method, _path, body in listener.heard if method == "POST")
    environment = json.loads(reported.read_text())
    for name in ("id", "verdict", "exit_code", "keys", "rto"):
        assert str(posted[name]) == environment[f"TIKV_BR_DRILL_{name.upper()}"] == str(summary[name])
    assert 'tikv_br_drill_success{scenario="lost-cluster"} 1.0' in (tmp_path / "drill.prom").read_text()
    text = drills.seen(page)
    assert "All objectives were met." in text
    assert f"target: the cluster at {recovery.pd}" in text
    assert contents(recovery) == {}


def test_every_missed_objective_is_named(drills: Drills, page: Page) -> None:
    """All four objectives of a recovery in a keyspace: code 62; the page shows each, and its trend."""
    asked = ("--rpo", "0s", "--rto", "0s", "--max-age", "0s", "--min-keys", str(len(ROWS) + 1))
    missed = drills.run(62, "--target-keyspace", str(SCRATCH), *asked)
    assert missed["name"] == "ObjectivesMissed"
    by_how_much = r"missed RPO \(.+, objective 0 s\), RTO \(.+, objective 0 s\), backup age \(.+, objective 0 s\), keys \(400, objective 401\)"
    assert re.search(by_how_much, missed["message"])
    assert [goal["met"] for goal in drills.report["goals"]] == [False] * 4
    text = drills.seen(page)
    assert text.count("✗ missed") == 4
    assert {"trend-RTO", "trend-RPO", "trend-size", "trend-speed"} <= set(page.value(PLOTS))


def test_a_cut_over_that_does_not_come_about_has_a_code_of_its_own(
    drills: Drills, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target stays behind for longer than --tail-patience: 65, and the page says by how much."""
    monkeypatch.setattr(Tail, "lag", lambda _: 31.0)
    flags = ("--tail", "100ms", "--tail-lag", "1s", "--tail-patience", "200ms", "--target-keyspace", str(SCRATCH))
    assert drills.run(65, *flags)["name"] == "CutOverFailed"
    assert drills.report["trouble"]["step"] == "follow the source"
    assert "31.0 s behind" in drills.seen(page)


@pytest.mark.parametrize("scenario", ["deleted-range", "corrupt-backup", "stale-safe-point"])
def test_a_scenario_that_passes(drills: Drills, page: Page, tmp_path: Path, scenario: str) -> None:
    """In a keyspace, or a playground."""
    flags = {
        "deleted-range": ("--start", "row0100", "--end", "row0200", "--target-keyspace", str(SCRATCH)),
        "corrupt-backup": ("--seed", "7", "--target-keyspace", str(SCRATCH)),
        "stale-safe-point": ("--target", "playground", "--target-stores", "1", "--work-dir", str(tmp_path / "work")),
    }[scenario]
    summary = drills.run(0, "--scenario", scenario, *flags)
    assert (summary["verdict"], summary["scenario"]) == ("passed", scenario)
    text = drills.seen(page)
    assert "Nothing was compared." not in text
    wanted = {
        "deleted-range": "The recovery worked.",
        "corrupt-backup": "The damage was detected",
        "stale-safe-point": "was refused, as required",
    }[scenario]
    assert wanted in text
    if scenario == "stale-safe-point":
        assert not list((tmp_path / "work").iterdir())


def test_a_point_in_time(drills: Drills, source: LiveCluster, backups: Path, page: Page, tmp_path: Path) -> None:
    """A random time, again the one that the report says, the last one, and one that is not possible."""
    backup_ts = BackupSet.open(open_store(parse(str(backups / "first")))).backup_ts
    log = write_log(
        parse(str(tmp_path / "log")), source.cluster.cluster_id, backup_ts, [source.cluster.pd.tso()], log_id="changes"
    )
    flags: tuple[str, ...] = ("--scenario", "point-in-time", "--log", f"local://{tmp_path}/log", "--log-id", log.id)
    flags += ("--target-keyspace", str(SCRATCH), "--rpo", "1h", "--rto", "1h", "--min-keys", "400")
    first = drills.run(0, *flags, "--within", "1h", "--seed", "3", "--compare-source")
    assert (first["verdict"], first["scenario"], first["keys"]) == ("passed", "point-in-time", len(ROWS))
    point = drills.report["point"]
    assert (point["restore_ts"], point["seed"]) == (first["restore_ts"], 3)
    assert point["first_ts"] <= point["restore_ts"] <= point["last_ts"]
    text = drills.seen(page)
    assert f"The drill restores {first['restore_ts']} " in text
    assert f"to repeat it: --until {first['restore_ts']}" in text
    assert "The recovery worked. All objectives were met." in text
    assert drills.run(0, *flags, "--until", str(first["restore_ts"]))["restore_ts"] == first["restore_ts"]
    assert drills.report["point"]["seed"] is None
    assert drills.run(0, *flags, "--until", "latest")["restore_ts"] == point["last_ts"]
    outside = drills.run(43, *flags, "--until", "2020-01-01T00:00:00Z")
    assert "outside the restorable window" in outside["message"]


@pytest.mark.parametrize("scenario", ["lost-cluster", "deleted-range"])
def test_a_damaged_backup_fails_what_restores_it(
    drills: Drills, backups: Path, page: Page, tmp_path: Path, scenario: str
) -> None:
    """Named by its URL, with a byte that is another: the code of damage, and the page names the file first."""
    copy = tmp_path / "copy"
    for path in sorted((backups / "first").rglob("*")):
        if path.is_file():
            (copy / path.relative_to(backups / "first")).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(backups / "first")).write_bytes(path.read_bytes())
    victim = min(copy.rglob("*.sst"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    flags = ("--start", "row0100") if scenario == "deleted-range" else ()
    place = ("--backup", f"local://{copy}", "--target-keyspace", str(SCRATCH))
    failed = drills.run(BackupDamaged.exit_code, "--scenario", scenario, *flags, *place)
    assert f"Report: local://{drills.newest}" in failed["hint"]
    text = drills.seen(page)
    assert text.index(victim.name) < text.index("Timeline")
    assert "do not rely on the backup" in text


def test_damage_that_is_not_found_has_a_code_of_its_own(
    drills: Drills, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were verify blind: 63."""
    monkeypatch.setattr("tikv_br.drill.damage.verify", lambda *_: None)
    failed = drills.run(63, "--scenario", "corrupt-backup", "--target-keyspace", str(SCRATCH))
    assert failed["name"] == "DamageNotFound"
    assert "The drill could not show that damage to a backup is detected." in drills.seen(page)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--target playground --target-pd 127.0.0.1:1", "--target playground"),
        ("--target cluster", "--target cluster"),
        ("--target-keyspace 7 --target-ca x.pem", "--target-pd"),
        ("--target-keyspace 7 --target-cert x.pem", "--target-pd"),
        ("--target-keyspace 7 --target-key x.pem", "--target-pd"),
        ("--canary x", "--canary was removed"),
        ("--target-prefix x", "--target-keyspace"),
        ("--target-prefix x --target-pd 127.0.0.1:1", "--target-prefix was removed"),
        ("--cut-over 1s", "--tail"),
        ("--tail 1s --scenario corrupt-backup", "lost-cluster"),
        ("--keyspace all", "--backup"),
        ("--scenario stale-safe-point --target-keyspace 7", "playground"),
        ("--scenario corrupt-backup --rto 1h", "corrupt-backup"),
        ("--scenario stale-safe-point --min-keys 1", "stale-safe-point"),
        ("--heartbeat-url nowhere", "http"),
        ("--webhook-url nowhere", "http"),
        ("--on-end '", "command"),
        ("--on-failure '", "command"),
        ("--tail soon", "soon"),
        ("--scenario point-in-time", "--log"),
        ("--log local:///nowhere", "point-in-time"),
        ("--until latest", "--log"),
        ("--compare-source", "--log"),
        ("--scenario point-in-time --log local:///nowhere --until whenever", "whenever"),
        ("--scenario point-in-time --log local:///nowhere --backup new", "--backup newest"),
        ("--scenario point-in-time --log local:///nowhere --tail 1s", "lost-cluster"),
    ],
)
def test_contradictory_flags_are_refused_without_a_report(drills: Drills, flags: str, said: str) -> None:
    """Code 2 with the reason, and nothing written."""
    refused = drills.run(2, *flags.split())
    assert said in refused["message"] + refused["hint"]
    assert not (drills.home / "reports").exists()


def test_no_flag_is_without_a_test(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag of ``drill run`` is used here."""
    assert tikv_br(["drill", "run", "--help-all"]) == 0
    flags = set(re.findall(r"^  (?:-\w, )?(--[\w.-]+)", capsys.readouterr().out, re.MULTILINE))
    assert {"--tail", "--storage", "--s3.ca"} <= flags
    text = Path(__file__).read_text(encoding="utf-8")
    assert {
        flag for flag in flags if not SHARED.fullmatch(flag) and f"{flag} " not in re.sub(r'["\']', " ", text)
    } == set()
