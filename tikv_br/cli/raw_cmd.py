"""``tikv-br raw``: single keys and ranges of a RawKV cluster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tikv_br.cli import key_flags, kinds, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.output import KeyForm, confirmation, human_bytes, human_seconds, listed, picked, quote, read_key, show
from tikv_br.cli.progress import progress_display
from tikv_br.errors import KeyNotFound, UsageError
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.keys.codec import successor
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.cluster.rawkv import RawClient

log = logging.getLogger(__name__)
PAGE_ROWS = 10_000
TTL_THREADS = 16  # a TTL costs a request of its own
Pair = tuple[bytes, bytes, int | None]  # key, value, expire_ts if asked for
KEY = partial(argument, REQUIRED, "KEY", "Key, as --key-format says: text with \\xNN escapes, or hex:…")


class RawFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    keyspace: str = shared.KEYSPACE()

    @contextlib.contextmanager
    def connected(self) -> Iterator[tuple[Cluster, RawClient]]:
        """The cluster and a client of the keyspace. Raises as `Cluster.connect`, and `UsageError`."""
        from tikv_br.cluster.cluster import Cluster
        from tikv_br.cluster.keyspaces import chosen_keyspace
        from tikv_br.cluster.versions import RAW

        with Cluster.connect(self.cluster.config()) as cluster:
            cluster.require(RAW)
            try:
                client = cluster.raw(chosen_keyspace(cluster, self.keyspace))
            except UnsupportedFormat as error:
                raise UsageError(f"--keyspace: {error}") from None
            yield cluster, client


class KeyFlags(RawFlags, key_flags.KeyFormatFlags):
    name: str = KEY()

    def key(self) -> bytes:
        """The key. Raises `UsageError`."""
        return read_key(self.name, self.form, "KEY")


class RawRangeFlags(RawFlags):
    range: key_flags.RangeFlags
    prefix: str = flag("", "Only keys with this prefix, instead of --start and --end.", metavar="KEY")

    def key_range(self) -> KeyRange:
        """The range of user keys. Raises `UsageError`."""
        if not self.prefix:
            return self.range.key_range()
        if self.range.start or self.range.end:
            raise UsageError("--prefix cannot be combined with --start and --end", hint="Pass one of them.")
        key = read_key(self.prefix, self.range.form, "--prefix")
        return KeyRange(key, successor(key))


class GetFlags(KeyFlags, key_flags.KeyAndValueFormatFlags):
    """A key, and how its value is written."""


class PutFlags(GetFlags):
    name: str = KEY()
    value: str = argument(REQUIRED, "VALUE", "Value, encoded as --value-format says.")
    ttl: float = flag("0s", "Time until the key expires, in whole seconds (0 = never).", kind=kinds.TIME)


@command("raw put", example="user:1 Ada --pd 10.0.0.1:2379")
def put(flags: PutFlags) -> None:
    """Write one key."""
    key, seconds = flags.key(), whole_seconds(flags.ttl)
    value = read_key(flags.value, flags.value_form, "VALUE")
    with flags.connected() as (cluster, client):
        _warn_of_transactions(cluster, key)
        client.put(key, value, seconds)
    flags.out.result("put", {"key": key.hex()})


def _no_key(flags: KeyFlags, key: bytes, client: RawClient) -> KeyNotFound:
    """The error for a key that is not there: in API V2 it may be in another keyspace."""
    if not client.codec.is_v2:
        return KeyNotFound(f"no key {quote(key, flags.form)}")
    hint = "Check the key, --key-format and --keyspace ID|NAME. `tikv-br raw scan` lists the keys of a keyspace."
    return KeyNotFound(f"no key {quote(key, flags.form)} in keyspace {client.codec.keyspace_id}", hint=hint)


@command("raw get", example="user:1 --pd 10.0.0.1:2379")
def get(flags: GetFlags) -> None:
    """Print the value of a key. Exit code 13 if the key does not exist."""
    key = flags.key()
    with flags.connected() as (_, client):
        value = client.get(key)
    if value is None:
        raise _no_key(flags, key, client)
    if flags.out.is_json:
        flags.out.result("pair", {"key": key.hex(), "value": value.hex()})
    elif flags.value_form is KeyForm.RAW:
        flags.out.data(value)
    else:
        flags.out.row({}, show(value, flags.value_form))


@command("raw delete", example="user:1 --pd 10.0.0.1:2379")
def delete(flags: KeyFlags) -> None:
    """Delete one key; succeeds if it does not exist."""
    key = flags.key()
    with flags.connected() as (cluster, client):
        _warn_of_transactions(cluster, key)
        client.delete(key)
    flags.out.result("delete", {"key": key.hex()})


def _warn_of_transactions(cluster: Cluster, key: bytes) -> None:
    """Warn if the region of a key, which is about to be written or deleted, has transactional data. One key is not refused: it may be meant."""
    from tikv_br.cluster.txnkv import find_transactions

    if find_transactions(cluster, KeyRange(key, key + b"\0")):
        log.warning(
            "there is transactional data beside this key, as of JuiceFS or SurrealDB: raw keys among it can break the programs that use it"
        )


class DeleteRangeFlags(RawRangeFlags):
    all_keys: bool = flag(
        False,
        "Delete all keys of the keyspace. Required without --start, --end and --prefix.",
        "--all",
        command_line=True,
    )
    yes: bool = flag(False, "Do not ask. Required if stdin is not a terminal.", "--yes", "--confirm", command_line=True)


@command("raw delete-range", example="--prefix user:1 --pd 10.0.0.1:2379")
def delete_range(flags: DeleteRangeFlags) -> None:
    """Delete all keys of a range at once. Writes no tombstones: changefeeds and log archives do not see it."""
    span = flags.key_range()
    if flags.all_keys is (span != EVERY_KEY):
        raise UsageError(
            "--all cannot be combined with a range" if flags.all_keys else "no range was given",
            hint="Pass --start and --end, or --prefix; or --all to delete all keys of the keyspace.",
        )
    confirm = confirmation("raw delete-range", yes=flags.yes)
    from tikv_br.cluster.txnkv import refuse_transactions
    from tikv_br.gc.status import followers

    bounds = f"from {quote(span.start, flags.range.form) or 'the beginning'} to {quote(span.end, flags.range.form) or 'the end'}"
    with flags.connected() as (cluster, client):
        refuse_transactions(cluster, span)
        rows = client.checksum(span).total_kvs
        if rows and (services := followers(cluster)):
            log.warning(
                "%s: what these syncs, changefeeds or logs write to keeps the rows, as a change feed has no deleted ranges",
                ", ".join(services),
            )
        confirm(f"Delete {rows:,} rows {bounds}?")
        client.delete_range(span)
    fields = {"start": span.start.hex(), "end": span.end.hex(), "total_kvs": rows}
    flags.out.result("delete_range", fields, f"Deleted {rows:,} rows {bounds}.")


@command("raw ttl", example="user:1 --pd 10.0.0.1:2379")
def show_ttl(flags: KeyFlags) -> None:
    """Print the remaining TTL of a key in seconds. Exit code 13 if the key does not exist."""
    key = flags.key()
    with flags.connected() as (_, client):
        seconds = client.get_ttl(key)
        expire_ts = client.now() + seconds if seconds else 0
    if seconds is None:
        raise _no_key(flags, key, client)
    text = str(seconds) if seconds else "never"
    flags.out.result("ttl", {"key": key.hex(), "ttl": seconds, "expire_ts": expire_ts}, text)


@command("raw checksum", example="--start user: --end 'user;' --pd 10.0.0.1:2379")
def checksum(flags: RawRangeFlags) -> None:
    """Print the checksum of a range as the stores compute it. In API V2 it covers the 4-byte keyspace prefix of the keys."""
    span = flags.key_range()
    with flags.connected() as (_, client):
        found = client.checksum(span)
    flags.out.result("checksum", picked(found, "crc64xor", "total_kvs", "total_bytes"))
    flags.out.pairs(
        [
            ("checksum", f"{found.crc64xor:016x}"),
            ("total-kv", f"{found.total_kvs:,}"),
            ("total-kv-size", f"{human_bytes(found.total_bytes)} ({found.total_bytes:,})"),
        ]
    )


def whole_seconds(duration: float) -> int:
    """Return a TTL in the seconds that servers count. Raises `UsageError` for fractions."""
    if duration != int(duration):
        raise UsageError(f"--ttl {duration}s is not valid: pass whole seconds")
    return int(duration)


class ScanFlags(RawRangeFlags):
    limit: int = flag(0, "Maximum number of pairs to print (0 = all).", limits=(0, kinds.MAX_COUNT))
    with_ttl: bool = flag(False, "Also print the expiry of each pair; costs one more request per pair.")


@command("raw scan", example="--prefix user: --limit 10 --pd 10.0.0.1:2379")
def scan(flags: ScanFlags) -> None:
    """Print the pairs of a range. One line of text each, or a JSON object with key and value in hex."""
    span = flags.key_range()
    with flags.connected() as (_, client):
        pages = _pages(client, span, flags.limit)
        if flags.with_ttl:
            if not client.codec.api_version.has_ttl:
                raise UsageError("--with-ttl: this cluster does not support TTLs (API V1 without storage.enable-ttl)")
            pages = _with_ttls(client, pages)
        as_lines = _json_lines if flags.out.is_json else _text_lines
        for page in pages:
            flags.out.lines(as_lines(page, flags.range.form))


def _pages(client: RawClient, span: KeyRange, limit: int) -> Iterator[list[Pair]]:
    """Yield the pairs of each page with user keys, ``limit`` in all unless it is 0."""
    left = limit or None
    for page in client.scan_pages(client.codec.rpc_range(span), min(limit or PAGE_ROWS, PAGE_ROWS)):
        keys, values = page.keys[:left].to_pylist(), page.values[:left].to_pylist()
        user_key = client.codec.user_key
        yield [(user_key(key), value, None) for key, value in zip(keys, values, strict=True)]
        if left is not None:
            left -= len(keys)
            if left <= 0:
                return


def _with_ttls(client: RawClient, pages: Iterable[list[Pair]]) -> Iterator[list[Pair]]:
    """Yield the pages with expiry times; a pair that has gone since its page was read is left out."""

    def expiry(pair: Pair) -> Pair | None:
        ttl = client.get_ttl(pair[0])
        return None if ttl is None else (pair[0], pair[1], client.now() + ttl if ttl else 0)

    with ThreadPoolExecutor(TTL_THREADS) as pool:
        for page in pages:
            yield [pair for pair in pool.map(expiry, page) if pair is not None]


def _json_lines(page: list[Pair], _form: KeyForm) -> str:
    return "".join(
        f'{{"key":"{key.hex()}","value":"{value.hex()}"}}\n'
        if expire_ts is None
        else f'{{"key":"{key.hex()}","value":"{value.hex()}","expire_ts":{expire_ts}}}\n'
        for key, value, expire_ts in page
    )


def _text_lines(page: list[Pair], form: KeyForm) -> str:
    return "".join(
        f"{show(key, form)}\t{show(value, form)}" + ("\n" if expire_ts is None else f"\t{expire_ts}\n")
        for key, value, expire_ts in page
    )


class ImportFlags(RawFlags):
    file: str | None = argument(
        None, "[FILE]", "File with JSON lines, CSV or Parquet, by its suffix; - reads JSON lines from stdin."
    )
    form: KeyForm | None = flag(
        None, "Format of keys and values in a text file.", "--format", show_default="hex in JSON, raw in CSV"
    )
    count: int | None = flag(None, "Generate this many pairs instead of reading a file.", limits=(0, kinds.MAX_COUNT))
    value_size: int = flag("100", "Size of each generated value.", kind=kinds.SIZE)
    seed: int = shared.SEED("Seed of generated values; the same seed gives the same values.")
    ttl: float = flag(
        "0s", "TTL of pairs that have none in the file, in whole seconds (0 = never expire).", kind=kinds.TIME
    )
    concurrency: int = flag(8, "Maximum number of concurrent batches.", limits=(1, kinds.MAX_CONCURRENCY))


@command("raw load", example="users.csv --pd 10.0.0.1:2379", hidden=True)
@command("raw import", example="users.csv --pd 10.0.0.1:2379")
def import_pairs(flags: ImportFlags) -> None:
    """Write pairs from a file, or generated pairs, to the cluster."""
    if (flags.file is None) == (flags.count is None):
        raise UsageError("raw import needs either FILE or --count")
    seconds = whole_seconds(flags.ttl)
    client: RawClient
    from tikv_br.cluster.txnkv import refuse_transactions
    from tikv_br.load.loader import load_pairs, made_pairs, open_source

    if flags.count is not None:
        source = made_pairs(flags.count, flags.value_size, flags.seed)
    else:
        file = None if flags.file == "-" else Path(flags.file or "")
        source = open_source(file, flags.form.value if flags.form else None, lambda: client.now())  # noqa: PLW0108 - once there is one
    with flags.connected() as (cluster, client), progress_display(flags.out) as display:
        refuse_transactions(cluster)
        loaded = load_pairs(
            client.column_writer(), source, ttl=seconds, concurrency=flags.concurrency, reporter=display
        )
    figures = [
        ("total-kv", f"{loaded.total_kvs:,}"),
        ("total-kv-size", human_bytes(loaded.total_bytes)),
        ("already-expired", f"{loaded.expired_kvs:,}"),
        ("total-take", human_seconds(loaded.seconds)),
        ("average-speed", f"{human_bytes(loaded.average_speed)}/s"),
    ]
    flags.out.result("summary", asdict(loaded), listed("Raw import success summary", figures))
