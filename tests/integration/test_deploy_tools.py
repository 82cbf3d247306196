"""Dockerfile, manifests, workflows, dashboard and alerts before other people's tools: hadolint, actionlint, schemas and promtool."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.check_manifests import CUSTOM, KUBERNETES, VERSIONS, WHEEL, read_schemas
from tests.support.tools import ROOT, find_tool, missing

pytestmark = pytest.mark.integration
HINT = "run scripts/install_deploy_tools.sh"
ALERTS = ROOT / "docs" / "alerts.yml"
COMPOSE_WHEEL = ROOT / ".cache" / "deploy" / "docker_compose-1.29.2.whl"
DASHBOARD = ROOT / "deploy" / "grafana" / "tikv-br.json"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool, and return what it says."""
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False, timeout=300)


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    """In the Dockerfiles; in one that installs more than it needs it does."""
    hadolint = find_tool("hadolint", hint=HINT)
    found = run(hadolint, *sorted(ROOT.glob("Dockerfile*")))
    assert found.returncode == 0, found.stdout
    worse = tmp_path / "Dockerfile"
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    worse.write_text(text.replace("--no-install-recommends ", ""), encoding="utf-8")
    assert "DL3015" in run(hadolint, worse).stdout


def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    """In the workflows; in one that names a matrix's value wrongly it does."""
    actionlint = find_tool("actionlint", hint=HINT)
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    found = run(actionlint, "-no-color", "-shellcheck=", *workflows)
    assert found.returncode == 0, found.stdout
    worse = tmp_path / "worse.yml"
    text = (ROOT / ".github" / "workflows" / "real.yml").read_text(encoding="utf-8")
    worse.write_text(text.replace("matrix.version }}\n    runs-on", "matrix.versoin }}\n    runs-on"), encoding="utf-8")
    assert "versoin" in run(actionlint, "-no-color", "-shellcheck=", worse).stdout


def test_the_compose_file_is_valid() -> None:
    """By Compose's schema; with all servers on 127.0.0.1, images of one version, and the API version that the page promises."""
    if not COMPOSE_WHEEL.exists():
        missing(f"no schema of Compose: {HINT}")
    with zipfile.ZipFile(COMPOSE_WHEEL) as wheel:
        schema = json.loads(wheel.read("compose/config/compose_spec.json"))
    folder = ROOT / "deploy" / "compose"
    document = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    assert list(validator.iter_errors(document)) == []
    assert [*validator.iter_errors({**document, "servces": {}})], "an unknown name is found"
    services = document["services"]
    assert services["pd"]["image"].removeprefix("pingcap/pd") == services["tikv"]["image"].removeprefix("pingcap/tikv")
    addresses = re.findall(r"[\w.]+(?=:\d{4,5}\b)", " ".join(str(each["command"]) for each in services.values()))
    assert len(addresses) == 8
    assert set(addresses) == {"127.0.0.1"}
    mounted = [each for service in services.values() for each in service["volumes"] if each.startswith("./")]
    assert mounted == ["./tikv.toml:/tikv.toml:ro"]
    assert tomllib.loads((folder / "tikv.toml").read_text())["storage"] == {
        "api-version": 2,
        "enable-ttl": True,
        "reserve-space": "0",
    }


def faults(document: dict[str, Any], schemas: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """Errors of the schema of its kind."""
    schema = schemas[document["apiVersion"], document["kind"]]
    return [each.message for each in jsonschema.Draft7Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    """Each resource by the schema of its kind, without unknown fields; a misspelt one is found."""
    if not WHEEL.exists():
        missing(f"no schemas of Kubernetes: {HINT}")
    schemas = read_schemas(version)
    kinds = set()
    for file in sorted(KUBERNETES.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if file.name == "kustomization.yaml" or document["kind"] in CUSTOM:
                continue
            kinds.add(document["kind"])
            assert faults(document, schemas) == [], file
            if document["kind"] == "Deployment":
                document["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
                assert "livenesProbe" in "".join(faults(document, schemas))
    assert {"CronJob", "Deployment", "Service", "ServiceAccount", "Secret"} <= kinds


def test_the_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    """By Prometheus's own parser, as recording rules; one that is broken is refused."""
    promtool = find_tool("promtool", hint=HINT)
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(expressions) > 40
    texts = [each.replace("$__rate_interval", "5m").replace("$sync", ".*") for each in expressions]
    rules = [{"record": f"r{number}", "expr": text} for number, text in enumerate(texts)]
    for extra, expected in (([], 0), ([{"record": "bad", "expr": "sum(("}], 1)):
        file = tmp_path / "rules.yml"
        file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules + extra}]}), encoding="utf-8")
        found = run(promtool, "check", "rules", file)
        assert found.returncode == expected, found.stderr


# --------------------------------------------------------------------------------------------------------------- alerts


@dataclass(frozen=True)
class Case:
    """Series, and the time (minutes after their first sample, one a minute) at which an alert is asked for."""

    alert: str
    series: dict[str, str]
    minute: int
    summary: str = ""
    """Summary of the alert that fires; empty: none does."""
    labels: dict[str, str] | None = None
    """Beside its name and severity."""


LAG = 'tikv_br_sync_checkpoint_lag_seconds{sync="east"}'
AT = 'tikv_br_sync_checkpoint_timestamp_seconds{sync="east"}'
FAILING = 'tikv_br_sync_sink_failing_seconds{sync="east"}'
SILENT = 'tikv_br_sync_pd_silent_seconds{sync="east"}'
HOLES = 'tikv_br_sync_feed_holes{sync="east"}'
LATE = 'tikv_br_sync_late_rows_total{sync="east"}'
DISK = 'tikv_br_sync_sorter_disk_bytes{sync="east"}'
HEALTHY = 'tikv_br_sync_healthy{sync="east"}'
UP = 'up{job="tikv-br-sync",instance="a"}'
NOW = "tikv_br_gc_status_timestamp_seconds"
SAFE = "tikv_br_gc_safe_point_timestamp_seconds"
WORKER = "tikv_br_gc_worker_timestamp_seconds"
PASSED = 'tikv_br_drill_success{scenario="lost-cluster"}'
PASSED_AT = 'tikv_br_drill_last_success_timestamp_seconds{scenario="lost-cluster"}'
FOUND = 'tikv_br_serve_findings{section="backups"}'
PREFIX = '{storage="s3://b",prefix="weekly/"}'
NEWEST = f"tikv_br_backup_newest_timestamp_seconds{PREFIX}"
ALLOWED = f"tikv_br_backup_max_age_seconds{PREFIX}"
SECTION = {"section": "backups"}
JOB = 'namespace="tikv",job_name="tikv-br-backup-1"'
FAILED = f"kube_job_status_failed{{{JOB}}}"
EAST = {"sync": "east"}
DRILL = {"scenario": "lost-cluster"}


def cron(name: str) -> str:
    """The time of the last success of a CronJob."""
    return f'kube_cronjob_status_last_successful_time{{namespace="tikv",cronjob="{name}"}}'


CASES = (
    Case("TikvBrSyncDown", {}, 5, "No sync answers", {}),
    Case("TikvBrSyncDown", {HEALTHY: "0x9", UP: "0x9"}, 5, "No sync answers", {"job": "tikv-br-sync", "instance": "a"}),
    Case("TikvBrSyncDown", {HEALTHY: "0x9", UP: "1x9"}, 5),
    Case("TikvBrSyncDown", {}, 1),
    Case("TikvBrSyncBehind", {LAG: "61x9"}, 6, "Sync east is 1m 1s behind", EAST),
    Case("TikvBrSyncBehind", {LAG: "60x9"}, 6),
    Case("TikvBrSyncBehind", {LAG: "99 99 99 9 99 99 99"}, 6),
    Case("TikvBrSyncStandsStill", {AT: "7x9"}, 9, "The checkpoint of sync east has not moved for five minutes", EAST),
    Case("TikvBrSyncStandsStill", {AT: "7+1x9"}, 9),
    Case("TikvBrSyncNearGc", {LAG: "43201x9"}, 1, "Sync east is 12h 0m 1s behind", EAST),
    Case("TikvBrSyncNearGc", {LAG: "43200x9"}, 1),
    Case("TikvBrSyncSinkFails", {FAILING: "61x9"}, 1, "The sink of sync east has accepted nothing for 1m 1s", EAST),
    Case("TikvBrSyncSinkFails", {FAILING: "60x9"}, 1),
    Case("TikvBrSyncPdSilent", {SILENT: "31x9"}, 1, "The PD of the source of sync east has not answered for 31s", EAST),
    Case("TikvBrSyncPdSilent", {SILENT: "30x9"}, 1),
    Case(
        "TikvBrSyncHoles", {HOLES: "2x9"}, 6, "Sync east has had no feed for part of its range for five minutes", EAST
    ),
    Case("TikvBrSyncHoles", {HOLES: "2 2 2 0 2 2 2"}, 6),
    Case("TikvBrSyncLateRows", {LATE: "4 4 5 5"}, 3, "Sync east received changes older than its resolved-ts", EAST),
    Case("TikvBrSyncLateRows", {LATE: "4x9"}, 3),
    Case("TikvBrSyncSorterGrows", {DISK: "11811160064x12"}, 11, "Sync east keeps 11GiB on disk", EAST),
    Case("TikvBrSyncSorterGrows", {DISK: "10737418240x12"}, 11),
    Case("TikvBrGcNoStatus", {}, 3, "The figures of GC are out of date", {}),
    Case("TikvBrGcNoStatus", {NOW: "0x20"}, 14, "The figures of GC are out of date", {}),
    Case("TikvBrGcNoStatus", {NOW: "0+60x20"}, 14),
    Case("TikvBrGcBehind", {NOW: "90000x12", SAFE: "3599x12"}, 11, "The GC safe point is 1d 0h 0m 1s old", {}),
    Case("TikvBrGcBehind", {NOW: "90000x12", SAFE: "3600x12"}, 11),
    Case("TikvBrGcBehind", {NOW: "90000x12", SAFE: "0x12"}, 11),
    Case("TikvBrGcNeverRan", {SAFE: "0x1500"}, 1450, "GC has never run", {}),
    Case("TikvBrGcNeverRan", {SAFE: "1x1500"}, 1450),
    Case(
        "TikvBrGcNoWorker",
        {NOW: "90000x12", WORKER: "3599x12"},
        11,
        "No GC worker has done a round for 1d 0h 0m 1s",
        {},
    ),
    Case("TikvBrGcNoWorker", {NOW: "90000x12", WORKER: "3600x12"}, 11),
    Case(
        "TikvBrGcHeldBack",
        {"tikv_br_gc_held_back_seconds": "21601x12"},
        11,
        "A service has held GC back for 6h 0m 1s",
        {},
    ),
    Case("TikvBrGcHeldBack", {"tikv_br_gc_held_back_seconds": "21600x12"}, 11),
    Case("TikvBrDrillFailed", {PASSED: "0x9"}, 1, "The last drill of scenario lost-cluster failed", DRILL),
    Case("TikvBrDrillFailed", {PASSED: "1x9"}, 1),
    Case(
        "TikvBrDrillOld",
        {PASSED_AT: "-691201x70"},
        65,
        "No drill of scenario lost-cluster has passed for 8d 1h 5m 1s",
        DRILL,
    ),
    Case("TikvBrDrillOld", {PASSED_AT: "-600000x70"}, 65),
    Case("TikvBrServeGone", {FOUND: "0 0 0 _x20"}, 25, "tikv-br serve no longer answers", SECTION),
    Case("TikvBrServeGone", {FOUND: "0x30"}, 25),
    Case(
        "TikvBrNewestBackupOld",
        {NEWEST: "-108001x12", ALLOWED: "108000x12"},
        11,
        "The newest backup in s3://b weekly/ is 1d 6h 11m 1s old",
        {"storage": "s3://b", "prefix": "weekly/"},
    ),
    Case("TikvBrNewestBackupOld", {NEWEST: "-108001x12", ALLOWED: "604800x12"}, 11),
    Case("TikvBrNewestBackupOld", {NEWEST: "-108001x12"}, 11),
    Case("TikvBrNeedsAttention", {FOUND: "2x40"}, 35, "2 things need attention in the section backups", SECTION),
    Case("TikvBrNeedsAttention", {FOUND: "0x40"}, 35),
    Case(
        "TikvBrBackupOld",
        {cron("tikv-br-backup"): "-108001x12"},
        11,
        "No backup of namespace tikv has ended well for 1d 6h 11m 1s",
        {"namespace": "tikv", "cronjob": "tikv-br-backup"},
    ),
    Case("TikvBrBackupOld", {cron("tikv-br-backup"): "-90000x12", cron("tikv-br-drill"): "-500000x12"}, 11),
    Case(
        "TikvBrDrillJobOld",
        {cron("tikv-br-drill"): "-691201x70"},
        65,
        "No drill of namespace tikv has passed for 8d 1h 5m 1s",
        {"namespace": "tikv", "cronjob": "tikv-br-drill"},
    ),
    Case("TikvBrDrillJobOld", {cron("tikv-br-drill"): "-600000x70"}, 65),
    Case(
        "TikvBrPruneOld",
        {cron("tikv-br-prune"): "-259201x70"},
        65,
        "Old backups of namespace tikv have not been removed for 3d 1h 5m 1s",
        {"namespace": "tikv", "cronjob": "tikv-br-prune"},
    ),
    Case("TikvBrPruneOld", {cron("tikv-br-prune"): "-200000x70"}, 65),
    Case(
        "TikvBrJobFailed",
        {FAILED: "1x9"},
        2,
        "The job tikv-br-backup-1 has failed pods",
        {"namespace": "tikv", "job_name": "tikv-br-backup-1"},
    ),
    Case("TikvBrJobFailed", {FAILED: "1x9", f"kube_job_status_succeeded{{{JOB}}}": "1x9"}, 2),
    Case("TikvBrJobFailed", {FAILED.replace("tikv-br-", "other-"): "1x9"}, 2),
)


def as_promtool_test(case: Case, rule: dict[str, Any]) -> dict[str, Any]:
    """The case in the format of ``promtool test rules``."""
    expected = []
    if case.summary:
        annotations = rule["annotations"] | {"summary": case.summary}
        expected = [{"exp_labels": rule["labels"] | (case.labels or {}), "exp_annotations": annotations}]
    asked = {"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": expected}
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    return {"interval": "1m", "input_series": series, "alert_rule_test": [asked]}


def test_alerts_fire_and_do_not(tmp_path: Path) -> None:
    """Each alert has a case on either side of its threshold, or of its time; the text has the figures."""
    promtool = find_tool("promtool", hint=HINT)
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert (
        {each.alert for each in CASES if each.summary}
        == {each.alert for each in CASES if not each.summary}
        == set(rules)
    )
    tests = [as_promtool_test(case, rules[case.alert]) for case in CASES]
    file = tmp_path / "alerts.test.yml"
    text = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(json.dumps(text), encoding="utf-8")
    found = run(promtool, "test", "rules", file)
    assert found.returncode == 0, found.stdout + found.stderr
