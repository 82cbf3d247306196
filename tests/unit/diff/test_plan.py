"""Division of ranges: a comparison, and the second look of a repair, cover the requested ranges once."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.fakes import region
from tikv_br.backupset.files import FileEntry
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.regions import Region
from tikv_br.compare.report import Counts, DifferenceKind, DifferentRange, KeyDifference, Report
from tikv_br.diff.places import BackupPlace, ClusterPlace, Unit, file_units, region_units, tasks
from tikv_br.diff.task import DiffJob, Repair, RepairJob, repairs
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.url import StorageLocation

V1, V2 = KeyCodec(ApiVersion.V1), KeyCodec(ApiVersion.V2, 4242)


def file(start: bytes, end: bytes) -> FileEntry:
    """A file of a range of RPC keys."""
    return FileEntry(f"{start.hex()}.sst", 1, start, end, 0, 0, 0)


@pytest.mark.parametrize("codec", [V1, V2])
@given(
    cuts=st.sets(st.binary(min_size=1, max_size=3), max_size=6),
    wanted=st.builds(KeyRange, st.binary(max_size=2), st.just(b"")),
    grown=st.booleans(),
)
def test_regions_cut_what_is_wanted(codec: KeyCodec, cuts: set[bytes], wanted: KeyRange, grown: bool) -> None:
    """Whatever regions there are, and if one grows between two pages, the units follow one another from the start to the end of the user range."""
    bounds = [b"", *(codec.bound(codec.rpc_key(cut)) for cut in sorted(cuts)), b""]
    regions = [Region.of(region(number, *ends)) for number, ends in enumerate(pairwise(bounds))]
    if grown and len(regions) > 1:  # the first page said that the last one begins later
        regions[-1] = Region.of(region(len(regions), regions[-2].start, b""))
    span = codec.rpc_range(wanted)
    first = codec.bound(span.start)
    found = [each for each in regions if not each.end or first < each.end]
    units = region_units(span, (each.end_within(codec, span) for each in found), codec)
    assert units[0].span.start == wanted.start
    assert units[-1].span.end == wanted.end
    assert all(one.span.end == other.span.start for one, other in pairwise(units))


def test_files_and_the_holes_between_them() -> None:
    """Each file's part is a unit; where the backup has no file, there is one without a file."""
    rpc = V2.rpc_key
    covered = [V2.rpc_range(KeyRange(b"b", b"x"))]
    files = [file(rpc(b"b"), rpc(b"f")), file(rpc(b"m"), rpc(b"x"))]
    units = file_units(V2.rpc_range(KeyRange(b"c", b"")), covered, files, V2)
    assert [(unit.span, unit.file and unit.file.name) for unit in units] == [
        (KeyRange(b"c", b"f"), files[0].name),
        (KeyRange(b"f", b"m"), None),
        (KeyRange(b"m", b"x"), files[1].name),
    ]
    with pytest.raises(UsageError, match="no part of the requested range"):
        file_units(V2.rpc_range(KeyRange(b"x", b"")), covered, files, V2)


@pytest.mark.parametrize(("count", "most"), [(0, 4), (1, 4), (4, 4), (5, 4), (10_000, 512)])
def test_units_are_put_together(count: int, most: int) -> None:
    """No more tasks than allowed, none empty, all units in order."""
    units = [Unit(KeyRange(b"%05d" % number, b"%05d" % (number + 1))) for number in range(count)]
    made = tasks(units, most)
    assert [unit for task in made for unit in task] == units
    assert len(made) <= most
    assert all(made)


def test_ranges_of_a_repair_go_to_their_units() -> None:
    """Each different range to the unit it lies in, whatever order they were found in; units without one are left out."""
    units = [Unit(KeyRange(b"", b"d")), Unit(KeyRange(b"d", b"m")), Unit(KeyRange(b"m", b""))]
    spans = [KeyRange(b"m", b"n"), KeyRange(b"a", b"b"), KeyRange(b"x", b""), KeyRange(b"b", b"d")]
    found = repairs(units, [DifferentRange(span, Counts(1)) for span in spans])
    assert found == [
        Repair(units[0], (KeyRange(b"a", b"b"), KeyRange(b"b", b"d"))),
        Repair(units[2], (KeyRange(b"m", b"n"), KeyRange(b"x", b""))),
    ]


def test_everything_that_travels_to_spark_pickles() -> None:
    """Jobs, tasks and reports come back as they were; a store comes back as its place."""
    cluster = ClusterPlace(ClusterConfig(pd=("pd:2379",)), KeyCodec(ApiVersion.V2, 7))
    store = LocalObjectStore(StorageLocation("local", "/backups"))
    job = RepairJob(DiffJob(BackupPlace(store, V1), cluster, 20, exact=True), delete=True)
    back = pickle.loads(pickle.dumps(job))
    assert back.diff.b == cluster
    assert (back.delete, back.diff.exact, back.diff.a.store.location) == (True, True, store.location)
    task = (Unit(KeyRange(b"", b""), file(b"a", b"b")),)
    report = Report(
        Counts(1), [DifferentRange(KeyRange(b"", b""), Counts(1))], [KeyDifference(DifferenceKind.ONLY_A, b"k", 5)]
    )
    assert pickle.loads(pickle.dumps((task, report))) == (task, report)
