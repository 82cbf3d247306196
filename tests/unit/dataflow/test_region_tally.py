"""Rows counted by region, also where regions change on the way."""

from __future__ import annotations

from tikv_br.backupset.coverage import RegionPart
from tikv_br.cluster.regions import Peer, Region, RegionCache
from tikv_br.dataflow.convert import Converter
from tikv_br.dataflow.write import RegionCounts
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

V1, V2 = KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V2)


class Cluster:
    """Regions that begin at some keys."""

    def __init__(self, *starts: bytes) -> None:
        self.starts = starts

    def region(self, key: bytes) -> Region:
        """As PD says."""
        bounds = [b"", *self.starts, b""]
        place = max(at for at, start in enumerate(bounds[:-1]) if start <= key)
        return Region(place + 1, bounds[place], bounds[place + 1], 1, 1, Peer(1, 1), ())


def tally(cluster: Cluster, start: bytes, end: bytes) -> RegionCounts:
    """Tally of a task that converts from V1 to V2."""
    return RegionCounts(RegionCache(cluster.region), Converter(V1, V2, 1), KeyRange(start, end))


def test_each_region_of_an_interval_has_its_rows() -> None:
    """Clipped to the interval, in keys of the target; regions without rows are left out."""
    counted = tally(Cluster(b"c", b"f", b"p"), b"a", b"x")
    for key in (b"a", b"b", b"c1", b"q"):
        counted.add(key, Checksum(0, 10, 100))
    prefix = V2.prefix
    assert counted.parts() == (
        RegionPart(prefix + b"a", prefix + b"c", 20, 200),
        RegionPart(prefix + b"c", prefix + b"f", 10, 100),
        RegionPart(prefix + b"p", prefix + b"x", 10, 100),
    )


def test_parts_do_not_overlap_where_regions_merge_and_split() -> None:
    """Counts stay; later rows go to the current region, from where the last part ended."""
    cluster = Cluster(b"c", b"f")
    counted = tally(cluster, b"", b"")
    counted.add(b"a", Checksum(0, 1, 1))
    cluster.starts = (b"h",)
    counted.add(b"d", Checksum(0, 2, 2))
    counted.add(b"i", Checksum(0, 3, 3))
    assert [(part.start[4:], part.total_kvs) for part in counted.parts()] == [(b"", 1), (b"c", 2), (b"h", 3)]
    assert counted.parts()[1].end == V2.prefix + b"h"
    assert counted.parts()[2].end == b"r\0\0\1"


def test_a_region_that_ends_at_no_key_costs_a_map_only() -> None:
    """In API V2, where bounds are encoded and PD can be made to split anywhere: its rows are counted all the same."""
    counted = RegionCounts(RegionCache(Cluster(b"s").region), Converter(V2, V2, 1), KeyRange(V2.prefix, b"s"))
    for key in (V2.prefix + b"a", V2.prefix + b"b"):
        counted.add(key, Checksum(0, 1, 10))
    assert sum(part.total_kvs for part in counted.parts()) == 2
