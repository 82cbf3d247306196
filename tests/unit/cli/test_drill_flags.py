from __future__ import annotations

import pytest

from tikv_br.cli.drill_cmd import DrillTargetFlags, RehearsedBackupFlags, TailFlags
from tikv_br.cli.shared import ClusterFlags, SparkFlags
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.ledger import EntryKind
from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.drill.targets import ClusterTarget
from tikv_br.errors import UsageError
from tikv_br.storage.url import parse

SOURCE = ClusterFlags(pd=["source:2379"], ca="/ca.pem")


def chosen(flags: DrillTargetFlags) -> ClusterTarget:
    """The cluster that some flags name."""
    target, _ = flags.choose(SOURCE)
    assert isinstance(target, ClusterTarget)
    return target


def test_flags_name_a_playground_a_cluster_or_a_keyspace() -> None:
    """Without flags it is a playground; a keyspace is the source's unless another PD is named."""
    target, removers = DrillTargetFlags().choose(SOURCE)
    assert isinstance(target, PlaygroundTarget)
    assert removers == {EntryKind.PLAYGROUND: target}
    assert chosen(DrillTargetFlags(target_keyspace="drills")).cluster == SOURCE.config()
    recovery = chosen(DrillTargetFlags(target_pd="recovery:2379"))
    assert (recovery.cluster.pd, recovery.cluster.tls.ca) == (("recovery:2379",), "/ca.pem")
    assert chosen(DrillTargetFlags(target_pd="recovery:2379", target_ca="")).cluster.tls.ca is None
    assert chosen(DrillTargetFlags(target_pd="recovery:2379", target_ca="/other.pem")).cluster.tls.ca == "/other.pem"


@pytest.mark.parametrize(
    "flags",
    [
        DrillTargetFlags(target="playground", target_pd="recovery:2379"),
        DrillTargetFlags(target="cluster"),
        DrillTargetFlags(target_ca="/other.pem", target_keyspace="drills"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: DrillTargetFlags) -> None:
    """A playground with an address, a cluster without, an authority of nobody."""
    with pytest.raises(UsageError):
        flags.choose(SOURCE)


def test_a_tail_takes_its_times_from_the_flags() -> None:
    """Without --tail there is none."""
    assert TailFlags().options() is None
    tail = TailFlags(tail=60.0, tail_lag=5.0).options()
    assert tail is not None
    assert (tail.seconds, tail.lag) == (60.0, 5.0)


def test_removed_flags_name_the_alternatives() -> None:
    """They are still recognised, so that a config file with them gets more than "no such option"."""
    for flags in (
        DrillTargetFlags(target_prefix="7a7a"),
        DrillTargetFlags(target_prefix="7a", target_keyspace="drills"),
    ):
        with pytest.raises(UsageError, match="--target-prefix was removed") as caught:
            flags.choose(SOURCE)
        assert "--target-keyspace" in caught.value.hint
        assert "empty cluster" in caught.value.hint
    for tail in (TailFlags(canary="7a7a"), TailFlags(tail=60.0, canary="7a7a")):
        with pytest.raises(UsageError, match="--canary was removed"):
            tail.options()


def test_a_backup_is_made_or_named() -> None:
    """Flags for making a backup are refused together with an existing one."""
    config, place = ClusterConfig(pd=("source:2379",)), parse("/backups")
    made = RehearsedBackupFlags(keyspaces=["all"], dst_api_version="v2", spark=SparkFlags()).new(config, place)
    assert made is not None
    assert (made.keyspaces, made.storage) == (("all",), place)
    named = RehearsedBackupFlags(backup="s3://bucket/one", spark=SparkFlags())
    assert (named.new(config, place), named.url) == (None, "s3://bucket/one")
    assert RehearsedBackupFlags(backup="newest", spark=SparkFlags()).url == ""
    with pytest.raises(UsageError, match="--keyspace"):
        RehearsedBackupFlags(backup="newest", keyspaces=["all"], spark=SparkFlags()).new(config, place)
