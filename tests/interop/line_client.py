"""Clients that are programs of their own: one JSON request a line in, one JSON answer a line out, bytes in base64.

Methods of RawKV are named as those of our own `RawClient`.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tests.support.raw_calls import CompareAndSwapResult
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

SCAN_LIMIT = 10_240
"""Rows that client-go returns at most for one call."""


@dataclass(frozen=True, slots=True)
class ScanLoop:
    """Result and cost of a scan of everything."""

    rows: int
    bytes: int
    """Bytes of keys and values."""
    seconds: float
    cpu_seconds: float


class ClientFailed(Exception):
    """The other client returned an error, or ended."""


class LineProgram:
    """Speaks to a program that a user would have written with another client. Use it in a `with` block."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()

    def _ask(self, operation: str, **arguments: object) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        request = {"op": operation} | {name: _text(value) for name, value in arguments.items()}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise ClientFailed(process.stderr.read())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ClientFailed(f"{operation}: {answer['error']}")
        return answer


class LineClient(LineProgram):
    """RawKV by another client."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None when there is none."""
        return _bytes(self._ask("get", key=key)["value"])

    def batch_get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those of the keys that exist."""
        values = map(_bytes, self._ask("batch_get", keys=keys)["values"])
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    def get_ttl(self, key: bytes) -> int | None:
        """Seconds until a key expires, 0 for never; None when there is no such key."""
        ttl: int | None = self._ask("ttl", key=key)["ttl"]
        return ttl

    def put(self, key: bytes, value: bytes, ttl: int = 0) -> None:
        """Write one pair."""
        self._ask("put", key=key, value=value, ttl=ttl)

    def batch_put(self, rows: Mapping[bytes, bytes]) -> None:
        """Write pairs that do not expire."""
        self._ask("batch_put", keys=list(rows), values=list(rows.values()), ttls=None)

    def batch_put_with_ttls(self, rows: Iterable[tuple[bytes, bytes, int]]) -> None:
        """As `batch_put`, with a TTL for each pair. Where none has one, none is sent: V1 would take that amiss."""
        keys, values, ttls = (list(column) for column in zip(*rows, strict=True))
        self._ask("batch_put", keys=keys, values=values, ttls=ttls if any(ttls) else None)

    def delete(self, key: bytes) -> None:
        """Remove one key."""
        self._ask("delete", key=key)

    def batch_delete(self, keys: Iterable[bytes]) -> None:
        """Remove keys."""
        self._ask("batch_delete", keys=list(keys))

    def delete_range(self, span: KeyRange) -> None:
        """Remove all of a range."""
        self._ask("delete_range", start=span.start, end=span.end)

    def scan(
        self, start: bytes = b"", end: bytes = b"", limit: int = SCAN_LIMIT, *, keys_only: bool = False
    ) -> list[tuple[bytes, bytes]]:
        """Pairs of [start, end) in order, where an empty end is no end."""
        return _pairs(self._ask("scan", start=start, end=end, limit=limit, keys_only=keys_only))

    def scan_loop(self, limit: int = SCAN_LIMIT) -> ScanLoop:
        """Read all there is page by page, in the program itself, and throw it away."""
        return ScanLoop(**self._ask("scan_loop", start=b"", end=b"", limit=limit))

    def reverse_scan(self, upper: bytes, lower: bytes, limit: int = SCAN_LIMIT) -> list[tuple[bytes, bytes]]:
        """Pairs of [lower, upper), from the upper end down."""
        return _pairs(self._ask("reverse_scan", start=upper, end=lower, limit=limit))

    def compare_and_swap(self, key: bytes, previous: bytes | None, value: bytes) -> CompareAndSwapResult:
        """Write the value if the key's is ``previous``; None means that there must be none."""
        answer = self._ask("cas", key=key, previous=previous, value=value)
        return CompareAndSwapResult(answer["swapped"], _bytes(answer["previous"]))

    def checksum(self, span: KeyRange = EVERY_KEY) -> Checksum:
        """The servers' checksum over a range."""
        return Checksum(**self._ask("checksum", start=span.start, end=span.end))


class TxnLineClient(LineProgram):
    """Transactions by another client, each with the keys and values of one call."""

    def write(self, rows: Mapping[bytes, bytes | None], mode: str = "optimistic") -> int:
        """Put, or delete with None, in one transaction; its start ts."""
        start_ts: int = self._ask("write", mode=mode, keys=list(rows), values=list(rows.values()))["start_ts"]
        return start_ts

    def prewrite_and_die(self, rows: Mapping[bytes, bytes | None], mode: str) -> None:
        """Begin a `write`, and be killed between prewrite and commit."""
        try:
            self._ask("prewrite_and_die", mode=mode, keys=list(rows), values=list(rows.values()))
        except ClientFailed as failed:
            if str(failed):  # it is alive
                raise
        assert self._process.wait(60) == -signal.SIGKILL

    def get(self, *keys: bytes, ts: int = 0) -> list[bytes | None]:
        """The values of keys, by default as of now."""
        return [_bytes(value) for value in self._ask("get", keys=list(keys), ts=ts)["values"]]

    def scan(self, start: bytes, end: bytes, *, ts: int = 0, reverse: bool = False) -> list[tuple[bytes, bytes]]:
        """All pairs of [start, end), by default as of now."""
        return _pairs(self._ask("scan", start=start, end=end, ts=ts, reverse=reverse, limit=SCAN_LIMIT))

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove all versions of [start, end) physically."""
        self._ask("delete_range", start=start, end=end)

    def collect_garbage(self, ts: int) -> int:
        """Resolve the locks up to a timestamp, and make it PD's GC safe point; what that is then."""
        safe_point: int = self._ask("gc", ts=ts)["ts"]
        return safe_point

    def open_accounts(self, accounts: int) -> None:
        """Give each account the same balance."""
        self._ask("open_accounts", accounts=accounts)

    def transfer(self, mode: str, accounts: int, workers: int, count: int) -> dict[str, int]:
        """Concurrent transfers, and sums of all accounts beside them: how often each was done, and how often in vain."""
        return self._ask("transfer", mode=mode, accounts=accounts, workers=workers, count=count)


def _text(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [_text(item) for item in value] if isinstance(value, list) else value


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _pairs(answer: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    keys, values = (map(base64.b64decode, answer[name] or ()) for name in ("keys", "values"))
    return list(zip(keys, values, strict=True))
