"""``tikv-br raw``: single keys and ranges of a RawKV cluster."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tikv_br.cli.keys import read_key, read_range, show
from tikv_br.cli.options import EndOption, FormatOption, KeyForm, StartOption, parse_duration
from tikv_br.cli.raw_load import load
from tikv_br.cli.raw_scan import scan
from tikv_br.cli.raw_session import RawSession, raw_command
from tikv_br.errors import KeyNotFound, UsageError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key, in the form that --format says.")]
ValueArgument = Annotated[str, typer.Argument(metavar="VALUE", help="The value, in the form of --value-format.")]
ValueFormOption = Annotated[
    KeyForm | None,
    typer.Option("--value-format", help="How the value is written.", show_default="as --format"),
]
TtlOption = Annotated[
    float,
    typer.Option("--ttl", parser=parse_duration, metavar="DURATION", help="Expire after 90s, 1h, …; 0: never."),
]


@app.callback()
def raw() -> None:
    """Read and write single keys and ranges of a RawKV cluster."""


@app.command("put")
@raw_command
def put(
    session: RawSession,
    name: KeyArgument,
    value: ValueArgument,
    form: FormatOption = KeyForm.RAW,
    value_form: ValueFormOption = None,
    ttl: TtlOption = 0,
) -> None:
    """Write one pair."""
    key, data, seconds = read_key(name, form, "KEY"), read_key(value, value_form or form, "VALUE"), whole_seconds(ttl)
    session.client.put(key, data, seconds)
    session.output.result("put", {"key": key.hex()})


@app.command("get")
@raw_command
def get(
    session: RawSession, name: KeyArgument, form: FormatOption = KeyForm.RAW, value_form: ValueFormOption = None
) -> None:
    """Write the value of a key to standard output; exit code 13 when there is none."""
    key = read_key(name, form, "KEY")
    value = session.client.get(key)
    if value is None:
        raise KeyNotFound(f"no key {show(key, form)}")
    if session.output.is_json:
        session.output.result("pair", {"key": key.hex(), "value": value.hex()})
    elif (value_form or form) is KeyForm.RAW:
        session.output.data(value)
    else:
        session.output.row({}, show(value, value_form or form))


@app.command("delete")
@raw_command
def delete(session: RawSession, name: KeyArgument, form: FormatOption = KeyForm.RAW) -> None:
    """Delete one key, whether it exists or not."""
    key = read_key(name, form, "KEY")
    session.client.delete(key)
    session.output.result("delete", {"key": key.hex()})


@app.command("delete-range")
@raw_command
def delete_range(
    session: RawSession,
    start: StartOption = "",
    end: EndOption = "",
    form: FormatOption = KeyForm.RAW,
    confirm: Annotated[bool, typer.Option("--confirm", help="Needed to delete without both bounds.")] = False,
) -> None:
    """Delete all keys of a range, with all their versions."""
    first, last = read_range(start, end, form)
    if not (first and last) and not confirm:
        raise UsageError("delete-range without --start or --end deletes to the end of the data", hint="Say --confirm.")
    session.client.delete_range(first, last)
    session.output.result("delete_range", {"start": first.hex(), "end": last.hex()})


@app.command("ttl")
@raw_command
def ttl(session: RawSession, name: KeyArgument, form: FormatOption = KeyForm.RAW) -> None:
    """Show the seconds until a key expires; exit code 13 when there is no such key."""
    key = read_key(name, form, "KEY")
    seconds = session.client.get_ttl(key)
    if seconds is None:
        raise KeyNotFound(f"no key {show(key, form)}")
    expire_ts = int(time.time()) + seconds if seconds else 0
    text = str(seconds) if seconds else "never"
    session.output.result("ttl", {"key": key.hex(), "ttl": seconds, "expire_ts": expire_ts}, text)


@app.command("checksum")
@raw_command
def checksum(
    session: RawSession, start: StartOption = "", end: EndOption = "", form: FormatOption = KeyForm.RAW
) -> None:
    """Show the servers' checksum of a range, as they count it: in API V2 keys have a prefix of 4 bytes."""
    first, last = read_range(start, end, form)
    found = session.client.checksum(first, last)
    fields = {"crc64xor": found.crc64xor, "total_kvs": found.total_kvs, "total_bytes": found.total_bytes}
    session.output.result("checksum", fields, "\n".join(f"{name}: {value}" for name, value in fields.items()))


def whole_seconds(duration: float) -> int:
    """Return a TTL in the seconds that servers count. Raises `UsageError` for fractions."""
    if duration != int(duration):
        raise UsageError(f"a TTL of {duration} s: servers count whole seconds")
    return int(duration)


app.command("scan")(raw_command(scan))
app.command("load")(raw_command(load))
