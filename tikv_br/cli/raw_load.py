"""``tikv-br raw load``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.options import KeyForm, parse_duration, parse_size
from tikv_br.cli.progress import progress_display
from tikv_br.cli.raw_session import RawSession
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.load.loader import Loaded
    from tikv_br.load.sources import Source


def load(
    session: RawSession,
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="JSON lines, CSV or Parquet by its suffix; - for JSON lines from stdin."),
    ] = None,
    form: Annotated[
        KeyForm | None,
        typer.Option(
            "--format", help="How a text file writes keys and values.", show_default="hex in JSON, raw in CSV"
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=0, help="Make this many pairs instead of reading.")
    ] = None,
    value_size: Annotated[
        int, typer.Option("--value-size", parser=parse_size, metavar="SIZE", help="Bytes of each made value.")
    ] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Made values depend on this and the row only.")] = 0,
    ttl: Annotated[
        float,
        typer.Option(
            "--ttl", parser=parse_duration, metavar="DURATION", help="TTL of pairs that bring none; 0: never."
        ),
    ] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Batches on their way at a time.")] = 8,
) -> None:
    """Put pairs from a file, or made ones (--count), into the cluster."""
    if (file is None) == (count is None):
        raise UsageError("raw load wants either a FILE or --count")
    if ttl != int(ttl):
        raise UsageError(f"a TTL of {ttl} s: servers count whole seconds")
    source = _made(count, value_size, seed) if count is not None else _read(file or "", form)
    from tikv_br.load.loader import load_pairs

    with progress_display(session.output) as display:
        loaded = load_pairs(session.client, source, ttl=int(ttl), concurrency=concurrency, reporter=display)
    session.output.summary(_fields(loaded), _shown(loaded), title="raw load")


def _made(count: int, value_size: int, seed: int) -> Source:
    from tikv_br.load.sources import made_pairs

    return made_pairs(count, value_size, seed)


def _read(file: str, form: KeyForm | None) -> Source:
    from tikv_br.load.sources import open_source

    return open_source(None if file == "-" else Path(file), form.value if form else None)


def _fields(loaded: Loaded) -> dict[str, object]:
    return {
        "total_kvs": loaded.total_kvs,
        "total_bytes": loaded.total_bytes,
        "expired_kvs": loaded.expired_kvs,
        "seconds": round(loaded.seconds, 3),
        "average_speed": round(loaded.total_bytes / loaded.seconds) if loaded.seconds else 0,
    }


def _shown(loaded: Loaded) -> dict[str, str]:
    speed = loaded.total_bytes / loaded.seconds if loaded.seconds else 0
    return {
        "total-kv": f"{loaded.total_kvs:,}",
        "total-kv-size": human_bytes(loaded.total_bytes),
        "already-expired": f"{loaded.expired_kvs:,}",
        "total-take": human_seconds(loaded.seconds),
        "average-speed": f"{human_bytes(speed)}/s",
    }
