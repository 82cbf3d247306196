"""Leaves in the storage what tasks of a backup leave, but for the rows: ``python -m …finished_tasks FOLDER RUN``.

Reads pickled pairs of index and task, and answers each with the message of its outcome. Each region has a file of one byte.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import sys
from itertools import pairwise
from pathlib import Path

from tikv_br import records
from tikv_br.backupset import layout
from tikv_br.backupset.coverage import RegionPart
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.backupset.ledger import FinishedTask, LedgerEntry
from tikv_br.dataflow.write import PhaseSeconds, TaskResult
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.tasks.task import TaskMessage

FILE_KVS, FILE_BYTES = 960_000, 96 << 20
CODEC = KeyCodec(ApiVersion.V2)


def main(folder: str, run: str) -> None:
    """Run all tasks."""
    top = Path(folder)
    for name in (layout.LEDGER, layout.SST_FOLDER):
        (top / name).mkdir(parents=True, exist_ok=True)
    incoming, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            index, task = pickle.load(incoming)
        except EOFError:
            return
        entry = finish(top, task, index, run)
        body = pickle.dumps(TaskResult(FinishedTask.of(entry), PhaseSeconds(scan=1.5, encode=0.25, upload=0.125)))
        pickle.dump(
            TaskMessage("result", index, 0, (len(entry.files) * FILE_BYTES, len(entry.files) * FILE_KVS), body), answers
        )
        answers.flush()


def finish(top: Path, task: KeyRange, index: int, run: str) -> LedgerEntry:
    """Write the files and the entry, without waiting for the disk."""
    attempt = hashlib.sha256(index.to_bytes(8, "big")).hexdigest()[:16]
    keys = bounds_within(task)
    files = tuple(
        file_entry(layout.data_name(FileKind.SST, task, attempt, number), start, end)
        for number, (start, end) in enumerate(keys)
    )
    for file in files:
        write(top / file.name, b"x")
    regions = tuple(RegionPart(start, end, FILE_KVS, FILE_BYTES) for start, end in keys)
    sums = Checksum(index, len(files) * FILE_KVS, len(files) * FILE_BYTES)
    entry = LedgerEntry(task.start, task.end, attempt, files, source=sums, run=run, regions=regions)
    write(top / layout.ledger_name(task, attempt), records.dump(entry))
    return entry


def bounds_within(task: KeyRange) -> list[tuple[bytes, bytes]]:
    """The regions of `pd_with_regions` in a task."""
    first, last = (re.search(rb"user:(\d+):", key) for key in (task.start, task.end))
    begin = int(first[1]) if first else 0
    end = int(last[1]) if last else begin + 1
    inner = [CODEC.rpc_key(b"user:%012d:profile" % number) for number in range(begin + 1, end)]
    keys = [task.start, *inner, task.end]
    return list(pairwise(keys))


def file_entry(name: str, start: bytes, end: bytes) -> FileEntry:
    """The record of a file; its sums are as random as those of real ones."""
    digest = hashlib.sha256(name.encode()).digest()
    return FileEntry(
        name=name,
        size=1,
        start_key=start,
        end_key=end,
        crc64xor=int.from_bytes(digest[:8], "big"),
        total_kvs=FILE_KVS,
        total_bytes=FILE_BYTES,
        sha256=digest,
        tail_sha256=hashlib.sha256(digest).digest(),
        tail_size=1,
        min_ts=1,
        max_ts=1,
    )


def write(path: Path, data: bytes) -> None:
    """Write a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    os.close(descriptor)


if __name__ == "__main__":
    main(*sys.argv[1:])
