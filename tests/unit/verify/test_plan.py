"""Selection of files and ranges to check."""

from __future__ import annotations

import pytest
from msgspec import structs

from tikv_br.backupset.files import FileEntry, FilePair
from tikv_br.compare.files import FilePart
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.rewrite import Rewrite
from tikv_br.storage.url import parse
from tikv_br.tasks.executor import ExecutorChoice
from tikv_br.verify.options import Level, Subset, VerifyOptions
from tikv_br.verify.run import SPARK_BYTES, ComparedRange, check_options, choose_executor, compare_tasks

OPTIONS = VerifyOptions(storage=parse("/backup"))


def file(start: bytes, end: bytes) -> FileEntry:
    """A file of one range."""
    return FileEntry(name=start.hex(), size=1, start_key=start, end_key=end, crc64xor=0, total_kvs=1, total_bytes=1)


def test_every_key_of_the_ranges_is_asked_for_once() -> None:
    """Files and the holes between them make up the ranges: a row where the backup has none is a difference, too."""
    pairs = [FilePair(file(b"b", b"c")), FilePair(file(b"d", b""), file(b"d", b""))]
    found = compare_tasks([ComparedRange(KeyRange(b"", b""))], pairs, with_gaps=True)
    parts = [FilePart(pair.file, pair.file.key_range, values=pair.values) for pair in pairs]
    assert found == [*parts, KeyRange(b"", b"b"), KeyRange(b"c", b"d")]


def test_a_subset_asks_for_its_files_only() -> None:
    """Files outside the subset are no hole."""
    pairs = [FilePair(file(b"b", b"c")), FilePair(file(b"d", b""))]
    found = compare_tasks([ComparedRange(KeyRange(b"", b""))], pairs[:1], with_gaps=False)
    assert found == [FilePart(pairs[0].file, pairs[0].file.key_range)]


def test_a_range_in_another_keyspace_is_compared_there() -> None:
    """Also the holes between its files, and only of the range: what lies beside it in the cluster is not looked at."""
    source, target = KeyCodec(ApiVersion.V2, 1), KeyCodec(ApiVersion.V2, 2)
    rewrite, span = Rewrite.of(source, b"", target, b""), source.rpc_range(KeyRange(b"a", b"m"))
    pair = FilePair(file(source.rpc_key(b"c"), source.rpc_key(b"z")))
    found = compare_tasks([ComparedRange(span, rewrite)], [pair], with_gaps=True)
    assert found == [
        FilePart(pair.file, source.rpc_range(KeyRange(b"c", b"m")), rewrite),
        target.rpc_range(KeyRange(b"a", b"c")),
    ]


@pytest.mark.parametrize(
    ("asked", "size", "kind"),
    [
        ("auto", 0, "driver"),
        ("auto", SPARK_BYTES - 1, "driver"),
        ("auto", SPARK_BYTES, "spark"),
        ("driver", SPARK_BYTES, "driver"),
        ("spark", 0, "spark"),
    ],
)
def test_spark_is_started_where_it_pays_or_is_asked_for(asked: ExecutorChoice, size: int, kind: str) -> None:
    """Auto goes by the bytes to read; a wish is a wish."""
    assert choose_executor(structs.replace(OPTIONS, executor=asked), size).executor == kind


def test_contradictions_are_refused_before_anything_is_read() -> None:
    """A subset of nothing, a comparison with no cluster and a master that is none."""
    with pytest.raises(UsageError, match="subset"):
        check_options(structs.replace(OPTIONS, level=Level.META, subset=Subset.parse("10%")))
    with pytest.raises(UsageError, match="--pd"):
        check_options(structs.replace(OPTIONS, level=Level.RESTORE))
    with pytest.raises(UsageError, match="master"):
        check_options(structs.replace(OPTIONS, executor="spark", spark_master="nonsense"))
    check_options(OPTIONS)
