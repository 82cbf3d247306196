"""Reads Parquet, CSV and JSON lines on threads of this process, in a directory or a cloud, as Spark reads them.

An input that Spark would read in another way, or refuse, raises `NeedsSpark`: so its rows do not depend on who reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tikv_br.bulk_load.inputs import (
    PART_BYTES,
    FileInput,
    InputFile,
    InputPart,
    NeedsSpark,
    check_column_names,
    for_spark,
)
from tikv_br.bulk_load.text import open_csv, open_json
from tikv_br.errors import StorageObjectMissing
from tikv_br.formats.parquet import bounded_batches
from tikv_br.storage.cloud_options import CloudFlags
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.tasks.inputs import Input

_CLOUD = re.compile(r"(s3|gcs|gs|azure|azblob)://")


def open_files(source: Input, clouds: CloudFlags, most_bytes: int, *, reason: str = "") -> FileInput:
    """Look at an input, without its rows. Raises `NeedsSpark`, also for more than ``most_bytes`` or a ``reason``, `StorageError`."""
    if reason:
        raise NeedsSpark(reason)
    if source.value_encoding == "avro":
        raise NeedsSpark("--value-encoding avro needs Spark's module")
    openers = {"parquet": _parquet, "csv": open_csv, "json": open_json}
    if source.spark_format not in openers:
        raise NeedsSpark(f"only Spark reads the format {source.spark_format}")
    files = _files(source.path, clouds)
    size = sum(file.size for file in files)
    if size >= most_bytes:
        raise NeedsSpark(f"the input has {size >> 20:,} MiB; Spark pays off from {most_bytes >> 20:,} MiB")
    if not all(file.size for file in files):
        raise NeedsSpark("the input has an empty file")
    names = [source.key_column, source.value_column, source.ttl_column, source.order_column]
    with for_spark():
        return openers[source.spark_format](source, files, list(dict.fromkeys(filter(None, names))))


def _files(path: str, clouds: CloudFlags) -> list[InputFile]:
    """The files of a path, folder or glob, by name."""
    is_cloud = bool(_CLOUD.match(path))
    place, _, parameters = path.partition("?") if is_cloud else (path, "", "")
    if re.search(r"[\[\]{}\\=%]", place) or (not is_cloud and ":" in place):
        raise NeedsSpark("its path has characters that Spark interprets")
    found = _cloud_files(place, parameters, clouds) if is_cloud else _local_files(place)
    if not found:
        raise NeedsSpark("no file was found")
    return sorted(found, key=lambda file: file.name)


def _local_files(path: str) -> list[InputFile]:
    base = Path(path)
    literal = next((each for each in (base, *base.parents) if not re.search(r"[*?]", str(each))), Path())
    found: list[Path] = []
    for each in [base] if literal == base else literal.glob(str(base.relative_to(literal))):
        if each.is_dir():
            found += _visible(list(each.iterdir()))
        elif each.is_file():
            found += _visible([each])
    if any(not each.is_file() for each in found):
        raise NeedsSpark("it has folders in a folder")
    return [InputFile(None, str(each), each.stat().st_size) for each in found]


def _visible(paths: Sequence[Path]) -> list[Path]:
    _check_names([each.name for each in paths])
    return [each for each in paths if not each.name.startswith(("_", "."))]


def _check_names(names: Sequence[str]) -> None:
    if any(name.startswith(("_metadata", "_common_metadata")) or "=" in name for name in names):
        raise NeedsSpark("it has partitions or summaries")


def _cloud_files(place: str, parameters: str, clouds: CloudFlags) -> list[InputFile]:
    scheme, _, rest = place.partition("://")
    segments = rest.rstrip("/").split("/")
    wild = next((at for at, each in enumerate(segments) if re.search(r"[*?]", each)), len(segments))
    at = max(min(wild, len(segments) - 1), 1)
    base, pattern = "/".join(segments[:at]), segments[at:]
    store = open_store(parse(f"{scheme}://{base}" + (f"?{parameters}" if parameters else ""), clouds))
    if wild == len(segments) and pattern:
        try:
            return [InputFile(store, pattern[0], store.stat(pattern[0]).size)]
        except StorageObjectMissing:
            pass
    found = []
    for info in store.list(pattern[0] if wild == len(segments) and pattern else ""):
        names = info.name.split("/")
        if len(names) < len(pattern) or not all(map(fnmatchcase, names, pattern)):
            continue
        _check_names(names)
        if len(names) > len(pattern) + 1:
            raise NeedsSpark("it has folders in a folder")
        if not names[-1].startswith(("_", ".")):
            found.append(InputFile(store, info.name, info.size))
    return found


@dataclass(frozen=True, slots=True)
class _RowGroups:
    file: InputFile
    metadata: pq.FileMetaData
    groups: tuple[int, ...]
    columns: tuple[str, ...]

    def read(self) -> Iterator[pa.Table]:
        with self.file.open() as opened, for_spark():
            file = pq.ParquetFile(opened, metadata=self.metadata, pre_buffer=self.file.store is not None)
            for batch in bounded_batches(opened, file, self.columns, self.groups):
                yield pa.Table.from_batches([batch])


def _parquet(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    if source.reader_options:
        raise NeedsSpark("--input-option is for Spark")
    schemas: list[pa.Schema] = []
    names: list[str] = []
    parts: list[InputPart] = []
    for file in files:
        with file.open() as opened:
            parquet = pq.ParquetFile(opened)
            whole, metadata = parquet.schema_arrow, parquet.metadata
        check_column_names(whole.names)
        schemas.append(pa.schema([whole.field(name).with_metadata(None) for name in columns if name in whole.names]))
        names = names or whole.names
        wanted = tuple(schemas[-1].names)
        parts += [_RowGroups(file, metadata, groups, wanted) for groups in _group_rows(metadata, wanted)]
    types = {tuple((field.name, field.type) for field in schema) for schema in schemas}
    if len(types) > 1:
        raise NeedsSpark("the columns of its files differ")
    return FileInput(tuple(parts), schemas[0], tuple(names))


def _group_rows(metadata: pq.FileMetaData, columns: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Neighbouring row groups of about `PART_BYTES` together."""
    groups: list[int] = []
    size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        groups.append(number)
        size += sum(each.total_uncompressed_size for each in chunks if each.path_in_schema.partition(".")[0] in columns)
        if size >= PART_BYTES:
            yield tuple(groups)
            groups, size = [], 0
    if groups:
        yield tuple(groups)
