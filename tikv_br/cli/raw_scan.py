"""``tikv-br raw scan``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.keys import read_range, show
from tikv_br.cli.options import EndOption, FormatOption, KeyForm, StartOption
from tikv_br.cli.raw_session import RawSession
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.rawkv import RawClient

PAGE_ROWS = 10_000
TTL_THREADS = 16  # a TTL costs a request of its own
Pair = tuple[bytes, bytes, int | None]  # key, value, expire_ts if asked for


def scan(
    session: RawSession,
    start: StartOption = "",
    end: EndOption = "",
    form: FormatOption = KeyForm.RAW,
    limit: Annotated[int, typer.Option("--limit", min=0, help="The most pairs to show; 0: all.")] = 0,
    with_ttl: Annotated[
        bool, typer.Option("--with-ttl", help="Show when each pair expires, one more request each.")
    ] = False,
) -> None:
    """Write the pairs of a range: a line of text each, or a JSON object with key and value in hex."""
    first, last = read_range(start, end, form)
    pages = _pages(session.client, first, last, limit)
    if with_ttl:
        if not session.client.codec.api_version.has_ttl:
            raise UsageError("--with-ttl: this cluster keeps no TTLs (API V1 without storage.enable-ttl)")
        pages = _with_ttls(session.client, pages)
    as_lines = _json_lines if session.output.is_json else _text_lines
    for page in pages:
        session.output.lines(as_lines(page, form))


def _pages(client: RawClient, start: bytes, end: bytes, limit: int) -> Iterator[list[Pair]]:
    """Yield the pairs of each page with user keys, ``limit`` in all unless it is 0."""
    left = limit or None
    for page in client.scan_pages(*client.codec.rpc_range(start, end), min(limit or PAGE_ROWS, PAGE_ROWS)):
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
        return None if ttl is None else (pair[0], pair[1], int(time.time()) + ttl if ttl else 0)

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
