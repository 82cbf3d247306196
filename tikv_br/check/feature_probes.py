"""What the cluster's version can do; the gates are those of the Go TiKV-BR."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tikv_br.check.probe import Probe, Verdict, ok, warn
from tikv_br.check.surroundings import Surroundings
from tikv_br.errors import RequestRefused

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that stores can do since a version."""

    name: str
    since: Version
    lack: str
    """What does not work without it."""

    def look(self, around: Surroundings) -> Verdict:
        """Whether the cluster can."""
        return self.judge(around.cluster.pd_http.cluster_version())

    def judge(self, version: str) -> Verdict:
        """Whether a cluster of a version such as ``8.5.2`` can. Raises `RequestRefused` for what is no version."""
        since = ".".join(map(str, self.since))
        if parse_version(version) >= self.since:
            return ok(f"cluster version {version}, {since} is needed")
        return warn(f"cluster version {version} is older than {since}: {self.lack}", f"Upgrade to {since} or newer.")


FEATURES = (
    Feature("conversion", (6, 1, 0), "backups cannot be written in another API version"),
    Feature(
        "checksum",
        (6, 1, 1),
        "nothing can be compared: restore needs --no-checksum, diff and verify --level restore do not work",
    ),
    Feature("backup-ts", (6, 2, 0), "backups of API V2 have no backup-ts to begin a tail from"),
    Feature("raw-split", (5, 2, 0), "regions cannot be split for a restore"),
)
FEATURE_PROBES = tuple(Probe(f"feature-{feature.name}", feature.look) for feature in FEATURES)


def parse_version(text: str) -> Version:
    """The numbers of ``v9.0.0-beta.2``: a pre-release counts as its release. Raises `RequestRefused`."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise RequestRefused(f"PD: the cluster version {text!r} does not read")
    return int(found[1]), int(found[2]), int(found[3])
