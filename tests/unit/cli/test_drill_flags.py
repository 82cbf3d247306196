from __future__ import annotations

import pytest

from tikv_br.cli.drill_places import BackupFlags, TargetFlags
from tikv_br.cli.drill_tail import TailFlags
from tikv_br.cli.option_groups import ClusterFlags
from tikv_br.cli.options import KeyForm
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.ledger import Kind
from tikv_br.drill.scratch import ClusterTarget
from tikv_br.drill.target import PlaygroundTarget
from tikv_br.errors import UsageError
from tikv_br.storage.url import parse

SOURCE = ClusterFlags(pd=["source:2379"], ca="/ca.pem")


def chosen(flags: TargetFlags) -> ClusterTarget:
    """The cluster that some flags name."""
    target, _ = flags.choose(SOURCE, KeyForm.RAW)
    assert isinstance(target, ClusterTarget)
    return target


def test_flags_name_a_playground_or_a_place_in_a_cluster() -> None:
    """Without flags it is a playground; a keyspace and a prefix are the source's, unless another PD is named."""
    target, removers = TargetFlags().choose(SOURCE, KeyForm.RAW)
    assert isinstance(target, PlaygroundTarget)
    assert removers == {Kind.PLAYGROUND: target}
    assert chosen(TargetFlags(target_keyspace="drills")).cluster == SOURCE.config()
    assert chosen(TargetFlags(target_prefix="zz/")).prefix == b"zz/"
    recovery = chosen(TargetFlags(target_pd="recovery:2379"))
    assert (recovery.cluster.pd, recovery.cluster.tls.ca) == (("recovery:2379",), "/ca.pem")
    assert chosen(TargetFlags(target_pd="recovery:2379", target_ca="")).cluster.tls.ca is None
    assert chosen(TargetFlags(target_pd="recovery:2379", target_ca="/other.pem")).cluster.tls.ca == "/other.pem"


@pytest.mark.parametrize(
    "flags",
    [
        TargetFlags(target="playground", target_pd="recovery:2379"),
        TargetFlags(target="cluster"),
        TargetFlags(target_ca="/other.pem", target_keyspace="drills"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: TargetFlags) -> None:
    """A playground with an address, a cluster without, an authority of nobody."""
    with pytest.raises(UsageError):
        flags.choose(SOURCE, KeyForm.RAW)


def test_a_tail_takes_its_time_and_its_key_from_the_flags() -> None:
    """Without --tail there is none, and a canary is a mistake; what earlier tails left can be removed in any case."""
    config = ClusterConfig(pd=("source:2379",))
    assert TailFlags().options(config, KeyForm.RAW) is None
    assert set(TailFlags().removers(config)) == {Kind.TAIL}
    asked = TailFlags(tail="1m", tail_lag=5.0, canary="7a7a").options(config, KeyForm.HEX)
    assert asked is not None
    assert (asked.seconds, asked.lag, asked.canary) == (60.0, 5.0, b"zz")
    with pytest.raises(UsageError, match="--canary"):
        TailFlags(canary="7a7a").options(config, KeyForm.HEX)


def test_a_backup_is_made_or_named() -> None:
    """How it is made is a mistake beside one that is there."""
    config, place = ClusterConfig(pd=("source:2379",)), parse("/backups")
    made = BackupFlags(keyspace=["all"], dst_api_version="v2").new(config, place)
    assert made is not None
    assert (made.keyspaces, made.storage) == (("all",), place)
    named = BackupFlags(backup="s3://bucket/one")
    assert (named.new(config, place), named.named) == (None, "s3://bucket/one")
    assert BackupFlags(backup="newest").named == ""
    with pytest.raises(UsageError, match="--keyspace"):
        BackupFlags(backup="newest", keyspace=["all"]).new(config, place)
