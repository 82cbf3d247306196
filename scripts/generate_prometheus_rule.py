#!/usr/bin/env python3
"""Generate deploy/kubernetes/components/monitoring/prometheus-rule.yaml from docs/alerts.yml.

scripts/generate_prometheus_rule.py [--check]      write it; with --check, exit with 1 if it is stale
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = PROJECT / "docs" / "alerts.yml"
TARGET = PROJECT / "deploy" / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
HEAD = """\
# Generated from docs/alerts.yml by scripts/generate_prometheus_rule.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tikv-br
spec:
"""


def render(alerts: str) -> str:
    """The resource, with the rule file as its `spec`."""
    rules = alerts[alerts.index("groups:\n") :]
    return HEAD + "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))


def main(arguments: Sequence[str]) -> int:
    """Write or check the file."""
    text = render(SOURCE.read_text(encoding="utf-8"))
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        print(f"{TARGET.relative_to(PROJECT)} is stale: run scripts/generate_prometheus_rule.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
