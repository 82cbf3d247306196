"""deploy/ and the Dockerfile match the program: files, commands, flags, variables, metrics."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from scripts.check_container import Instruction, context_files, read_stages
from scripts.generate_prometheus_rule import main as generate_rule
from tests.unit.drill.samples import passed
from tests.unit.incremental.statuses import status
from tests.unit.serve import samples
from tikv_br.cli.command import leaves
from tikv_br.cli.main import app
from tikv_br.cluster.pd_http import GcStatus, ServiceSafePoint
from tikv_br.cluster.timestamps import compose
from tikv_br.drill.objectives import Measured, Objectives, judge
from tikv_br.drill.report import notify
from tikv_br.gc.metrics import WorkerFigures, write_metrics
from tikv_br.gc.status import report
from tikv_br.report.hooks import Hooks
from tikv_br.serve.web import collect
from tikv_br.web.metrics import registry, respond

PROJECT = Path(__file__).resolve().parents[2]
KUBERNETES = PROJECT / "deploy" / "kubernetes"
DASHBOARD = json.loads((PROJECT / "deploy" / "grafana" / "tikv-br.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((PROJECT / "docs" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
COMMANDS = dict(leaves(typer.main.get_command(app)))
STAGES = read_stages((PROJECT / "Dockerfile").read_text(encoding="utf-8"))
CORE_STAGES = read_stages((PROJECT / "Dockerfile.core").read_text(encoding="utf-8"))
FOREIGN = {
    "up": {"job", "instance"},
    "kube_cronjob_status_last_successful_time": {"namespace", "cronjob"},
    "kube_job_status_failed": {"namespace", "job_name"},
    "kube_job_status_succeeded": {"namespace", "job_name"},
}
"""Metrics of Prometheus and kube-state-metrics, with the labels that we use."""

# ------------------------------------------------------------------------------------------------------------ container


def instructions(name: str, stage: int) -> list[Instruction]:
    """Those of a stage that have this name."""
    return [each for each in STAGES[stage].instructions if each.name == name]


def test_the_build_context_has_all_packages_and_nothing_else() -> None:
    """.dockerignore leaves what the Dockerfile copies: each file of the packages, and no cache, test or key."""
    context = {each.as_posix() for each in context_files(PROJECT)}
    copied = [source for each in instructions("COPY", 0) for source in each.words[:-1]]
    for source in copied:
        assert (PROJECT / source).exists(), source
    assert {
        each for each in context if not any(each == name or each.startswith(f"{name}/") for name in copied)
    } == set()
    packages = [name for name in copied if (PROJECT / name).is_dir() and name != "requirements"]
    wheel = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"]} == set(packages)
    files = {
        each.relative_to(PROJECT).as_posix()
        for name in packages
        for each in (PROJECT / name).rglob("*")
        if each.is_file() and not {"__pycache__", "compiled"} & set(each.parts)
    }
    assert files <= context
    assert not [each for each in context if re.search(r"/(__pycache__|compiled)/", each)]


def test_the_image_runs_the_program_as_an_ordinary_user() -> None:
    """The entry point is the program of the wheel, the user a number other than 0, and the last stage compiles nothing."""
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert json.loads(instructions("ENTRYPOINT", -1)[0].text)[0] in scripts
    uid = int(instructions("USER", -1)[-1].text.partition(":")[0])
    assert uid >= 1000
    assert all(pod["securityContext"]["runAsUser"] == uid for _, pod in pods())
    last = " ".join(each.text for each in instructions("RUN", -1))
    assert f"--uid {uid}" in last
    assert not re.search(r"\bpip\b|gcc|build-essential|-dev\b", last)


def test_the_slim_image_is_the_other_one_without_java_and_compiler() -> None:
    """It copies the same files, and ends with the same user, folder and entry point; the compiler and numba stay in the stage that builds."""
    for name, at in (("USER", -1), ("ENV", -1), ("ENTRYPOINT", -1), ("WORKDIR", -1), ("COPY", -1), ("HEALTHCHECK", -1)):
        assert [each for each in CORE_STAGES[at].instructions if each.name == name] == instructions(name, at)
    copied = [each for each in CORE_STAGES[0].instructions if each.name == "COPY"]
    assert copied == instructions("COPY", 0)
    runs = [" ".join(each.text for each in stage.instructions if each.name == "RUN") for stage in CORE_STAGES]
    assert "g++" in runs[0]
    assert "-r requirements/kernels.txt" in runs[0]
    assert not re.search(r"requirements/(image|dev)|apt-get.*-jre|\bpip\b.*opt/tikv-br.*kernels\.txt", runs[0])
    (last,) = re.findall(r"^useradd.*$", runs[1])
    assert last in " ".join(each.text for each in instructions("RUN", -1))
    packages = {each.partition("==")[0] for each in (PROJECT / "requirements/core.txt").read_text("utf-8").splitlines()}
    assert not packages & {"pyspark", "pandas", "numba", "llvmlite"}


def test_a_release_pushes_both_images() -> None:
    """Each from its Dockerfile, under a tag of its own, on the base image of one digest."""
    jobs = yaml.safe_load((PROJECT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    built = [each["with"] for each in jobs["container"]["steps"] if "build-push-action" in each.get("uses", "")]
    assert [each.get("file", "Dockerfile") for each in built] == ["Dockerfile", "Dockerfile.core"]
    assert len({each["tags"] for each in built}) == 2
    assert len({each["build-args"] for each in built}) == 1
    bases = [(PROJECT / name).read_text("utf-8") for name in ("Dockerfile", "Dockerfile.core")]
    assert len({line for text in bases for line in text.splitlines() if line.startswith("ARG BASE=")}) == 1


def test_the_steps_of_the_build_use_what_there_is() -> None:
    """Modules that are run exist, versions and hashes are those of requirements, and the Java is one that Spark runs with."""
    steps = " ".join(each.text for each in instructions("RUN", 0))
    (module,) = re.findall(r"python -m (?!venv)(\S+)", steps)
    spark = Path(str(importlib.util.find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
    removed = re.findall(r"jars/(\S+?\.jar)", steps)
    assert len(removed) > 10
    assert [each for each in removed if not list(spark.glob(f"jars/{each}"))] == [], "jars of another version of Spark"
    assert importlib.util.find_spec(module) is not None
    assert "--require-hashes" in steps
    assert "openjdk-17-jre-headless" in instructions("RUN", -1)[0].text
    folder = instructions("COPY", -1)[0]
    assert folder.flag("from") == STAGES[0].name
    assert instructions("ENV", -1)[0].text == f"PATH={folder.words[0]}/bin:$PATH"


def test_actions_are_pinned_by_commit() -> None:
    """A tag can be moved to other code; the version stands beside the commit, and one action has one commit everywhere."""
    texts = [path.read_text(encoding="utf-8") for path in (PROJECT / ".github" / "workflows").glob("*.yml")]
    used = [line for text in texts for line in re.findall(r"uses: (.+)", text)]
    pinned = [re.fullmatch(r"([\w/.-]+)@([0-9a-f]{40}) # v[\d.]+", each) for each in used]
    assert len(used) > 10
    assert all(pinned)
    assert len({each[0] for each in pinned if each}) == len({each[1] for each in pinned if each})


def test_an_unknown_instruction_is_refused() -> None:
    """So that scripts/check_container.py cannot leave out a step of the Dockerfile."""
    with pytest.raises(ValueError, match="ADD"):
        read_stages("FROM scratch\nADD x /\n")


# ----------------------------------------------------------------------------------------------------------- Kubernetes


@cache
def documents() -> list[tuple[Path, dict[str, Any]]]:
    """All resources with their files."""
    files = [each for each in sorted(KUBERNETES.rglob("*.yaml")) if each.name != "kustomization.yaml"]
    return [(file, one) for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def kustomizations() -> list[tuple[Path, dict[str, Any]]]:
    """All kustomizations with their folders."""
    found = sorted(KUBERNETES.rglob("kustomization.yaml"))
    return [(each.parent, yaml.safe_load(each.read_text(encoding="utf-8"))) for each in found]


def pods() -> list[tuple[str, dict[str, Any]]]:
    """The names of workloads, and the specifications of their pods."""
    paths = {"CronJob": ("jobTemplate", "spec", "template", "spec"), "Deployment": ("template", "spec")}
    found = []
    for _, one in documents():
        if one["kind"] in paths:
            spec = one["spec"]
            for name in paths[one["kind"]]:
                spec = spec[name]
            found.append((one["metadata"]["name"], spec))
    return found


def environment() -> dict[str, str]:
    """The variables of a pod, with all components: config.env files and literals, and those of the manifests and secrets."""
    found = {"JOB_NAME": "tikv-br-backup-29384750"}
    for folder, one in kustomizations():
        for generator in one.get("configMapGenerator", []):
            lines = list(generator.get("literals", []))
            for name in generator.get("envs", []):
                lines += (folder / name).read_text(encoding="utf-8").splitlines()
            found |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return found


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_the_command_parses(name: str, pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real command, with the variables of the pod: no unknown flag, no missing one, no bad value."""
    (container,) = pod["containers"]
    variables = environment()
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container["args"]]
    path, command = next((path, COMMANDS[path]) for length in (2, 1) if (path := tuple(words[:length])) in COMMANDS)
    context = command.make_context(" ".join(path), words[len(path) :])
    if name == "tikv-br-prune":  # it needs no cluster; without a rule it would keep nothing, and is refused
        assert "--yes" in words
        assert any(value for flag, value in context.params.items() if flag.startswith("keep"))
    else:
        assert context.params["pd"] == ["basic-pd.tikv:2379"], name
    addresses = [word for word in words if word.startswith("--status-addr=")]
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    assert [int(each.rpartition(":")[2]) for each in addresses] == list(ports.values())


def test_the_variables_are_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tikv-br config check` finds no mistake in them, and finds one that is added."""
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    command = typer.main.get_command(app)
    command.main(["config", "check", "--config", "/dev/null"], standalone_mode=False)
    capsys.readouterr()
    monkeypatch.setenv("TIKV_BR_STORAG", "x")
    with pytest.raises(Exception, match="1 mistake"):
        command.main(["config", "check", "--config", "/dev/null"], standalone_mode=False)


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_pods_have_no_rights(name: str, pod: dict[str, Any]) -> None:
    """The restricted pod security standard is met: a read-only root, no token, and a /tmp to write to."""
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True, name
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/tmp"]]["emptyDir"]["sizeLimit"]
    assert set(mounts.values()) == set(volumes)
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert container["resources"]["limits"]["memory"]


def test_servers_are_probed_and_scraped() -> None:
    """Every server of status has probes and the key for Prometheus; no liveness depends on the health."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for _, one in documents():
        kinds.setdefault(one["kind"], []).append(one)
    (monitor,) = kinds["ServiceMonitor"]
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    services = [each for each in kinds["Service"] if selected <= each["metadata"]["labels"].items()]
    secret = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    jobs = set()
    for deployment in kinds["Deployment"]:
        template = deployment["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
        (service,) = (each for each in services if each["spec"]["selector"].items() <= labels)
        (port,) = service["spec"]["ports"]
        jobs.add(service["metadata"]["name"])
        (container,) = template["spec"]["containers"]
        assert port["targetPort"] in {each["name"] for each in container["ports"]}
        assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "status"}
        assert container["livenessProbe"].get("httpGet", {}).get("path") != "/healthz"
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "status-key")
        assert f"--status-key-file={mount['mountPath']}/{secret['key']}" in container["args"]
        (volume,) = (each for each in template["spec"]["volumes"] if each["name"] == "status-key")
        assert volume["secret"]["secretName"] == secret["name"]
        one_process_only = container["args"][0] in {"log", "sync"}
        assert (deployment["spec"]["strategy"]["type"] == "Recreate") is one_process_only
        assert (deployment["spec"]["replicas"] == 1) is one_process_only
    assert {each["metadata"]["name"] for each in kinds["CronJob"]} == set(re.findall(r'cronjob="(.*?)"', str(ALERTS)))
    assert set(re.findall(r'job="(.*?)"', str(ALERTS).replace("cronjob", ""))) <= jobs
    assert {each["spec"]["concurrencyPolicy"] for each in kinds["CronJob"]} == {"Forbid"}


def test_no_two_follow_the_source_under_one_name() -> None:
    """Log and sync have safe points of their own in PD; with one name GC could pass the slower one."""
    followers = [
        pod["containers"][0]["args"] for _, pod in pods() if pod["containers"][0]["args"][0] in {"log", "sync"}
    ]
    names = [[word for word in words if word.startswith("--id=")] for words in followers]
    assert len(names) == 2
    assert names[0] != names[1]


def test_kustomizations_name_all_files() -> None:
    """Each file is used by its folder, each component and base by the example, and secrets by nobody."""
    used: set[Path] = set()
    for folder, one in kustomizations():
        used.add(folder / "kustomization.yaml")
        for name in one.get("resources", []) + one.get("components", []):
            path = (folder / name).resolve()
            assert path.exists(), path
            used.add(path / "kustomization.yaml" if path.is_dir() else path)
        used |= {folder / name for each in one.get("configMapGenerator", []) for name in each.get("envs", [])}
    files = {each for each in KUBERNETES.rglob("*") if each.is_file()}
    assert {each.relative_to(KUBERNETES).as_posix() for each in files - used} == {
        "overlays/example/secrets.example.yaml"
    }


def test_the_tls_component_mounts_what_its_variables_name() -> None:
    """The keys of tidb-operator's secret, in the folder where the patches mount it; patches point into every workload."""
    _, tls = next(each for each in kustomizations() if each[0].name == "tls")
    variables = dict(each.split("=", 1) for generator in tls["configMapGenerator"] for each in generator["literals"])
    assert {Path(each).name for each in variables.values()} == {"ca.crt", "tls.crt", "tls.key"}
    kinds = {each["target"]["kind"]: yaml.safe_load(each["patch"]) for each in tls["patches"]}
    for _, one in documents():
        if one["kind"] not in {"CronJob", "Deployment"}:
            continue
        for operation in kinds[one["kind"]]:
            at: Any = one
            *steps, last = operation["path"].strip("/").split("/")
            for step in steps:
                at = at[int(step) if isinstance(at, list) else step]
            assert (operation["op"], last, isinstance(at, list)) == ("add", "-", True)
            if "mountPath" in operation["value"]:
                assert {str(Path(each).parent) for each in variables.values()} == {operation["value"]["mountPath"]}


def test_the_prometheus_rule_is_generated() -> None:
    """From docs/alerts.yml; scripts/generate_prometheus_rule.py writes it."""
    assert generate_rule(["--check"]) == 0
    (rule,) = (one for _, one in documents() if one["kind"] == "PrometheusRule")
    assert rule["spec"]["groups"] == ALERTS


# -------------------------------------------------------------------------------------------------- dashboard and alerts


@cache
def product_metrics(folder: Path) -> dict[str, set[str]]:
    """The labels of each sample that the product exposes, from its own registries."""
    from prometheus_client.parser import text_string_to_metric_families

    from tikv_br.incremental.watch.server import SyncReporter
    from tikv_br.incremental.watch.status import NamedStatus

    gc, drill = folder / "gc.prom", folder / "drill.prom"
    points = (ServiceSafePoint("tikv-br-backup-x", compose(1_000_000), 1 << 62),)
    write_metrics(
        gc, report(GcStatus(compose(1_000_000), points, compose(2_000_000)), compose(3_000_000)), WorkerFigures(1)
    )
    done = passed()
    goals = judge(Objectives(), Measured(rpo=1, rpo_method="", rto=1, cut_over=1, age=1, keys=1))
    assert notify(Hooks(textfile=str(drill)), dataclasses.replace(done, goals=goals), "") == []
    page = respond(SyncReporter(lambda: [NamedStatus("east", status())], 300).metrics, "text/plain").body
    overview = respond(registry(lambda: collect(samples.overview())), "text/plain").body
    labels: dict[str, set[str]] = {}
    for text in (overview.decode(), page.decode(), gc.read_text(encoding="utf-8"), drill.read_text(encoding="utf-8")):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels[sample.name] = set(sample.labels) | {"job", "instance", "namespace", "pod"}
    return labels


def panels() -> Iterator[dict[str, Any]]:
    """All panels but rows."""
    yield from (each for each in DASHBOARD["panels"] if each["type"] != "row")


def queries() -> Iterator[tuple[str, str, str]]:
    """Place, expression, and text with labels, of each query of the dashboard and of each alert."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for rule in itertools.chain.from_iterable(group["rules"] for group in ALERTS):
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


WORD = re.compile(r"\b(?:tikv_br|process|kube)_[a-z0-9_]+\b|\bup\b")


def test_metrics_and_labels_are_exposed(tmp_path: Path) -> None:
    """Dashboard and alerts ask only for metrics that the product, Prometheus or kube-state-metrics have, with labels that they have."""
    known = product_metrics(tmp_path) | FOREIGN
    seen = set()
    for place, expression, text in queries():
        names = set(WORD.findall(expression))
        assert names, place
        assert names <= set(known), place
        seen |= names
        labels = set.union(*(known[name] for name in names))
        shown = {each for each in re.findall(r"{{ ?(\w+) ?}}", text) if each != "value"}
        asked = set(re.findall(r"(\w+)=~?\"", expression))
        assert shown | asked <= labels, place
    ours = {name for name in product_metrics(tmp_path) if name.startswith("tikv_br_")}
    assert ours - seen == {"tikv_br_build_info"}, "the dashboard shows every metric"


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """Ids are unique, panels do not overlap, each has a unit, a description and the data source that is chosen."""
    found = DASHBOARD["panels"]
    assert len({each["id"] for each in found}) == len(found)
    assert {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]} == {
        "datasource": "datasource",
        "sync": "query",
    }
    cells: set[tuple[int, int]] = set()
    for each in found:
        grid = each["gridPos"]
        mine = set(itertools.product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])))
        assert grid["x"] + grid["w"] <= 24
        assert not mine & cells, each["title"]
        cells |= mine
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for each in panels():
        assert each["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in each["targets"])
        assert each["fieldConfig"]["defaults"]["unit"], each["title"]
        assert each["description"].endswith("."), each["title"]
        assert len({target["refId"] for target in each["targets"]}) == len(each["targets"])


def test_alerts_are_documented() -> None:
    """Each has a severity, and stands in a table of one page, with what to do."""
    pages = " ".join(
        (PROJECT / "docs" / name).read_text(encoding="utf-8")
        for name in ("monitoring.md", "gc.md", "drill.md", "kubernetes.md", "serve.md")
    )
    documented = re.findall(r"^\| `(TikvBr\w+)` \| .+ \| .+ \|$", pages, re.MULTILINE)
    rules = [rule for group in ALERTS for rule in group["rules"]]
    assert {rule["labels"]["severity"] for rule in rules} == {"warning", "critical"}
    assert sorted(documented) == sorted(rule["alert"] for rule in rules)
