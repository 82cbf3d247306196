"""What backups hold, and which keyspace is meant, as commands between two clusters whose PDs name keyspaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import succeed, tikv_br
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tikv_br.cluster.keyspaces import keyspace_names
from tikv_br.formats.api_version import ApiVersion

ROWS = {b"k%04d" % number: b"of features" for number in range(300)}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LiveCluster]:
    """Keyspace 1 is ``features``, with rows."""
    with live_cluster(tmp_path / "source", ApiVersion.V2, stores=1) as live:
        assert live.create_keyspace("features") == 1
        live.raw(1).batch_put(ROWS)
        yield live


def test_a_backup_that_leaves_rows_out_says_so(source: LiveCluster, tmp_path: Path) -> None:
    """Also with --quiet, as a cron job has it: an empty one ends with 66, one of a few junk rows with a warning."""
    flags = ("--pd", source.pd, "--executor", "driver", "-q")
    empty = tikv_br("backup", "raw", *flags, "-s", str(tmp_path / "backups" / "empty"))
    assert empty.code == 66
    assert "features (1)" in empty.err
    source.raw(0).put(b"junk", b"v")
    junk = succeed("backup", "raw", *flags, "-s", str(tmp_path / "backups" / "junk"))
    assert "Warning: keyspaces with rows that this backup leaves out: features (1)" in junk.err
    assert junk.out == ""
    succeed("backup", "raw", *flags, "-s", str(tmp_path / "backups" / "first"), "--keyspace", "features")
    assert keyspace_names(source.cluster, [0, 1, 2]) == {1: "features"}
    [listed, *_] = [
        line for line in succeed("list", str(tmp_path / "backups"), "--output", "json").lines if line["path"] == "first"
    ]
    assert (listed["keyspaces"], listed["keyspace_names"], listed["total_kvs"]) == ([1], ["features"], len(ROWS))
    assert "features (1)" in succeed("list", str(tmp_path / "backups")).out
    assert "features" in succeed("show", str(tmp_path / "backups" / "first")).out
    source.raw(1).batch_delete(sorted(ROWS)[10:])
    less = succeed(
        "backup",
        "raw",
        *flags,
        "-s",
        str(tmp_path / "backups" / "second"),
        "--keyspace",
        "features",
        "--safe-interval",
        "0s",
    )
    assert "this backup has 10 rows, less than half of the 300" in less.err


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LiveCluster]:
    """Keyspace 1 is ``billing``."""
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as live:
        assert live.create_keyspace("billing") == 1
        yield live


def test_keyspaces_of_another_cluster_are_found_by_name(
    source: LiveCluster, target: LiveCluster, tmp_path: Path
) -> None:
    """Another tenant's keyspace of the same id gets nothing, by whichever command, unless it is named."""
    place = str(tmp_path / "backup")
    succeed("backup", "raw", "--pd", source.pd, "-s", place, "--keyspace", "features", "--executor", "driver")
    restore = ("restore", "raw", "--pd", target.pd, "-s", place)
    follow = ("sync", "--pd", source.pd, "--keyspace", "features", "--sink", f"tikv://{target.pd}", "--start-ts", "now")
    stateful = (*follow, "--state-dir", str(tmp_path / "state"))
    compare = ("diff", "--pd", source.pd, "--keyspace", "features", "--other-pd", target.pd, "--executor", "driver")
    for command in (restore, stateful, (*follow[:-2], "--mode", "diff"), compare):
        refused = tikv_br(*command)
        assert refused.code == 2, refused.err
        assert "has no keyspace features" in refused.err
        assert "keyspace 1 is billing" in refused.err
    assert contents(target, 1) == {}
    assert target.create_keyspace("features") == 2
    succeed(*restore, "--keyspace", "features")
    assert contents(target, 2) == ROWS
    assert contents(target, 1) == {}
    succeed(*compare)
    succeed("diff", place, "--pd", target.pd, "--executor", "driver")
    assert succeed("cat", place, "k0001", "--keyspace", "features").out.strip() == "of features"
    assert "features (1)" in tikv_br("cat", place, "k0001", "--keyspace", "billing").err
    succeed(*restore, "--to-keyspace", "billing")
    assert contents(target, 1) == ROWS
