"""Finds the files of an input, in a directory or a cloud, and reads Parquet, CSV and JSON lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tikv_br.backupset.layout import EXPORT_RECORD
from tikv_br.bulk_load.inputs import PART_BYTES, FileInput, InputFile, InputPart, NeedsSpark, Rows, reading
from tikv_br.bulk_load.text import open_csv, open_json
from tikv_br.errors import StorageObjectMissing, UsageError
from tikv_br.formats.parquet import bounded_batches
from tikv_br.storage.cloud_options import CloudFlags
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.tasks.inputs import Input, missing_column

_CLOUD = re.compile(r"(s3|gcs|gs|azure|azblob)://")


def open_files(source: Input, clouds: CloudFlags) -> FileInput:
    """Look at an input, without its rows. Raises `NeedsSpark`, `UsageError`, `StorageError`."""
    if source.value_encoding == "avro":
        raise NeedsSpark("--value-encoding avro needs Spark's module")
    if source.reader_options:
        raise NeedsSpark("--input-option is for Spark's reader")
    openers = {"parquet": _parquet, "csv": open_csv, "json": open_json}
    if source.spark_format not in openers:
        raise NeedsSpark(f"only Spark reads the format {source.spark_format}")
    files, hidden = _files(source.path, clouds)
    columns = list(dict.fromkeys(name for _, name in source.used_columns))
    opened = openers[source.spark_format](source, files, columns)
    encoding = source.encoding or (_export_encoding(files[0]) if source.is_text else "raw")
    return replace(opened, files=tuple(files), hidden=hidden, encoding=encoding)


def _files(path: str, clouds: CloudFlags) -> tuple[list[InputFile], int]:
    """The files of a path, folder or glob, at any depth, by name, and the number of hidden ones."""
    is_cloud = bool(_CLOUD.match(path))
    place, _, parameters = path.partition("?") if is_cloud else (path, "", "")
    if re.search(r"[\[\]{}\\]", place) or (not is_cloud and ":" in place):
        raise NeedsSpark("its path has characters that Spark interprets")
    found = list(_cloud_files(place, parameters, clouds) if is_cloud else _local_files(place))
    files = [file for file, is_hidden in found if not is_hidden]
    if not files:
        raise NeedsSpark("no file was found")
    return sorted(files, key=lambda file: file.name), len(found) - len(files)


def _is_hidden(names: Sequence[str]) -> bool:
    return any(name.startswith(("_", ".")) for name in names)


def _local_files(path: str) -> Iterator[tuple[InputFile, bool]]:
    """Yield files, and whether they are hidden. What the path itself names is not."""
    base = Path(path)
    literal = next((each for each in (base, *base.parents) if not re.search(r"[*?]", str(each))), Path())
    seen: set[str] = set()
    for each in [base] if literal == base else literal.glob(str(base.relative_to(literal))):
        beyond = each.relative_to(literal).parts
        if each.is_file():
            yield InputFile(None, str(each), each.stat().st_size), _is_hidden(beyond)
        for folder, folders, names in os.walk(each, followlinks=True) if each.is_dir() else ():
            if os.path.realpath(folder) in seen:  # a link to a folder above
                folders.clear()
                continue
            seen.add(os.path.realpath(folder))
            for file in (Path(folder, name) for name in names):
                yield InputFile(None, str(file), file.stat().st_size), _is_hidden(file.relative_to(literal).parts)


def _cloud_files(place: str, parameters: str, clouds: CloudFlags) -> Iterator[tuple[InputFile, bool]]:
    scheme, _, rest = place.partition("://")
    segments = rest.rstrip("/").split("/")
    wild = next((at for at, each in enumerate(segments) if re.search(r"[*?]", each)), len(segments))
    at = max(min(wild, len(segments) - 1), 1)
    base, pattern = "/".join(segments[:at]), segments[at:]
    store = open_store(parse(f"{scheme}://{base}" + (f"?{parameters}" if parameters else ""), clouds))
    literal = len(pattern) if wild == len(segments) else 0
    if literal:
        try:
            yield InputFile(store, pattern[0], store.stat(pattern[0]).size), False
        except StorageObjectMissing:
            pass
        else:
            return
    for info in store.list(pattern[0] if literal else ""):
        names = info.name.split("/")
        if len(names) >= len(pattern) and all(map(fnmatchcase, names, pattern)) and names[-1]:
            yield InputFile(store, info.name, info.size), _is_hidden(names[literal:])


def _export_encoding(file: InputFile) -> str:
    """Notation of keys and values in a file of our exports, which describe themselves; raw for others."""
    folder, _, name = file.name.rpartition("/")
    record = f"{folder}/{EXPORT_RECORD}" if folder else EXPORT_RECORD
    try:
        data = Path(record).read_bytes() if file.store is None else file.store.get(record)
        found = json.loads(data)
        parts = {part["name"] for part in found["files"]}
        return str(found["encoding"]) if name in parts and found["encoding"] in {"hex", "escaped"} else "raw"
    except (OSError, StorageObjectMissing, ValueError, KeyError, TypeError):
        return "raw"


@dataclass(frozen=True, slots=True)
class _RowGroups:
    file: InputFile
    metadata: pq.FileMetaData
    groups: tuple[int, ...]
    columns: tuple[str, ...]

    tasks = 1

    def blocks(self) -> Iterator[Callable[[], Rows]]:
        with reading(self.file), self.file.open() as opened:
            file = pq.ParquetFile(opened, metadata=self.metadata, pre_buffer=self.file.store is not None)
            for batch in bounded_batches(opened, file, self.columns, self.groups):
                yield partial(Rows, _plain(pa.Table.from_batches([batch])))


def _plain(table: pa.Table) -> pa.Table:
    """Replace types of other tools that have the same values in another form."""
    return table.cast(pa.schema([field.with_type(_plain_type(field.type)) for field in table.schema]))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else views.get(kind, kind)


def _parquet(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    parts: list[InputPart] = []
    known: tuple[str, ...] = ()
    schema: pa.Schema | None = None
    for file in files:
        with reading(file), file.open() as opened:
            parquet = pq.ParquetFile(opened)
            whole, metadata = parquet.schema_arrow, parquet.metadata
        for flag, name in source.used_columns:
            if whole.names.count(name) != 1:
                if f"{name}=" in file.name:
                    raise NeedsSpark("it has partitions")
                raise missing_column(flag, name, whole.names, file.name if known else "")
        found = pa.schema([(name, _plain_type(whole.field(name).type)) for name in columns])
        if schema is not None and list(map(_family, found.types)) != list(map(_family, schema.types)):
            raise UsageError(
                f"{file.name} has columns of other types than {files[0].name}: "
                + ", ".join(f"{field.name} {field.type}" for field in found),
                hint="Load files with other types by a command of their own.",
            )
        schema, known = schema or found, known or tuple(whole.names)
        parts += [_RowGroups(file, metadata, groups, tuple(columns)) for groups in _group_rows(metadata, columns)]
    return FileInput(tuple(parts), schema, known)


def _family(kind: pa.DataType) -> object:
    """The same for types whose values become bytes in the same way."""
    if pa.types.is_integer(kind):
        return "integer"
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return "bytes" if any(is_one(kind) for is_one in texts) else kind


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
