"""The commands of deploy/kubernetes against a playground: jobs end well, and servers pass their probes and are scraped."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.command import PROGRAM, environment, succeed
from tests.support.etcd import real_etcd
from tests.support.live_cluster import live_cluster
from tests.support.tools import ROOT
from tests.support.waiting import PATIENCE, eventually
from tikv_br.formats.api_version import ApiVersion

KUBERNETES = ROOT / "deploy" / "kubernetes"
SERVERS = ("log", "sync", "capture", "gc")
KEY = "0123456789abcdef"


def container(file: str) -> dict[str, Any]:
    """The only container of a workload."""
    spec = yaml.safe_load((KUBERNETES / file).read_text(encoding="utf-8"))["spec"]
    template = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]
    (found,) = template["spec"]["containers"]
    return dict(found)


def arguments(file: str, variables: dict[str, str], key: Path) -> list[str]:
    """Its arguments as Kubernetes expands them, with a free port and a key of the test."""
    changed = {"--status-addr": "127.0.0.1:0", "--status-key-file": str(key)}
    words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container(file)["args"]]
    return [f"{name}={changed[name]}" if (name := word.partition("=")[0]) in changed else word for word in words]


def code(url: str, key: str = "") -> int:
    """Status of the answer to a request; 0 without one: a process that compiles kernels may be slow to answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE / 4) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def answers(process: subprocess.Popen[str], expected: int, url: str, key: str = "") -> bool:
    """Whether it answers so; fails if the process has ended."""
    assert process.poll() is None
    return code(url, key) == expected


@pytest.mark.slow
def test_the_pods_do_their_work(tmp_path: Path) -> None:
    """A job backs up below the root; log, sync, capture and GC worker get ready, stay alive, are scraped with the key, and end by SIGTERM."""
    key = tmp_path / "key"
    key.write_text(KEY)
    with (
        live_cluster(tmp_path / "playground", ApiVersion.V2, stores=1) as live,
        real_etcd(tmp_path / "etcd") as etcd,
        contextlib.ExitStack() as stack,
    ):
        live.raw().put(b"key", b"value")
        variables: dict[str, Any] = {
            "STORAGE_ROOT": str(tmp_path / "root"),
            "JOB_NAME": "first",
            "TIKV_BR_PD": live.pd,
            "TIKV_BR_ETCD": etcd.address,
            "TIKV_BR_SYNC_SINK": "blackhole://",
            "TIKV_BR_SYNC_FROM_BACKUP": str(tmp_path / "root" / "backups" / "first"),
            "TIKV_BR_OUTPUT": "json",
        }
        assert succeed(*arguments("base/backup.yaml", variables, key), **variables).last["total_kvs"] == 1
        processes = []
        for name in SERVERS:
            command = arguments(f"components/{name}/deployment.yaml", variables, key)
            process = subprocess.Popen(
                [str(PROGRAM), *command], stdout=subprocess.PIPE, text=True, env=environment(**variables), cwd="/"
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for name, process in zip(SERVERS, processes, strict=True):
            assert process.stdout is not None
            reported = json.loads(process.stdout.readline())
            assert reported["message_type"] == "listening", name
            pod, url = container(f"components/{name}/deployment.yaml"), reported["url"]
            probes = [pod[probe].get("httpGet", {}).get("path") for probe in ("readinessProbe", "livenessProbe")]
            asked = [(200, path, "") for path in probes if path] + [(401, "/metrics", ""), (200, "/metrics", KEY)]
            for expected, path, presented in asked:
                target = url.rstrip("/") + path
                eventually(partial(answers, process, expected, target, presented), 3 * PATIENCE)
        for process in processes:
            process.terminate()
        for name, process in zip(SERVERS, processes, strict=True):
            process.communicate(timeout=2 * PATIENCE)
            assert process.returncode == 143, name
    assert (tmp_path / "root" / "backups" / "first" / "backupmeta").exists()
    assert list((tmp_path / "root" / "log").rglob("log.json"))
