#!/usr/bin/env python3
"""Build deploy/kubernetes with kustomize and validate the result with kubeconform, as `kubectl apply -k` would: ``scripts/check_manifests.py``.

Builds both programs with Go, which takes a minute the first time. The schemas are those that scripts/install_deploy_tools.sh installs;
resources of prometheus-operator have none and are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
KUBERNETES = PROJECT / "deploy" / "kubernetes"
CACHE = PROJECT / ".cache"
WHEEL = CACHE / "deploy" / "kubernetes_validate-1.37.0.whl"
VERSIONS = ("1.30.0", "1.37.0")
PROGRAMS = {
    "kustomize": "sigs.k8s.io/kustomize/kustomize/v5@v5.5.0",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0",
}
SCHEMAS = {
    ("v1", "ConfigMap"): "configmap-v1",
    ("v1", "Secret"): "secret-v1",
    ("v1", "Service"): "service-v1",
    ("v1", "ServiceAccount"): "serviceaccount-v1",
    ("batch/v1", "CronJob"): "cronjob-batch-v1",
    ("apps/v1", "Deployment"): "deployment-apps-v1",
}
CUSTOM = ("ServiceMonitor", "PrometheusRule")


def read_schemas(version: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The schema of each kind in a version of Kubernetes, which refuse unknown fields; each contains all that it refers to."""
    folder = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict"
    with zipfile.ZipFile(WHEEL) as wheel:

        def read(name: str) -> dict[str, Any]:
            text = wheel.read(f"{folder}/{name}.json").decode().replace("/api/_definitions.json#", "#")
            schema: dict[str, Any] = json.loads(text.replace("_definitions.json#", "#"))
            schema.pop("$id", None)
            return schema

        shared = {name: part for name, part in read("_definitions").items() if name in {"$defs", "definitions"}}
        return {kind: read(name) | shared for kind, name in SCHEMAS.items()}


def find_program(name: str) -> Path:
    """The path of a program that is built from its Go module if it is not there."""
    path = CACHE / "bin" / name
    if not path.exists():
        environment = os.environ | {"GOBIN": str(path.parent), "GOFLAGS": "-mod=mod"}
        subprocess.run(["go", "install", PROGRAMS[name]], check=True, env=environment)
    return path


def main() -> int:
    """Build and validate; the exit code of kubeconform."""
    kustomize, kubeconform = find_program("kustomize"), find_program("kubeconform")
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        files = [KUBERNETES / "overlays" / "example" / "secrets.example.yaml"]
        for folder in (KUBERNETES / "base", KUBERNETES / "overlays" / "example"):
            files.append(Path(scratch, f"{folder.name}.yaml"))
            files[-1].write_bytes(subprocess.run([kustomize, "build", folder], check=True, capture_output=True).stdout)
        for version in VERSIONS:
            schemas = Path(scratch, version)
            schemas.mkdir()
            for kind, schema in read_schemas(version).items():
                (schemas / f"{SCHEMAS[kind]}.json").write_text(json.dumps(schema), encoding="utf-8")
            location = f"{schemas}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
            command = [str(kubeconform), "-strict", "-summary", "-schema-location", location, "-skip", ",".join(CUSTOM)]
            status |= subprocess.run(
                [*command, "-kubernetes-version", version, *map(str, files)], check=False
            ).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
