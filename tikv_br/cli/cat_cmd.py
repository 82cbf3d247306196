"""``tikv-br cat``."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Annotated

import typer

from formats.errors import InvalidKeyText
from formats.keytext import format_key, parse_key
from tikv_br.cli.options import FormatOption, KeyForm
from tikv_br.cli.storage_session import StorageSession, complete_id, storage_command, utc
from tikv_br.errors import KeyNotFound, UsageError

if TYPE_CHECKING:
    from tikv_br.proof.lookup import FoundValue

log = logging.getLogger(__name__)
app = typer.Typer(rich_markup_mode=None)


@app.command("cat", no_args_is_help=True)
@storage_command
def cat(
    session: StorageSession,
    first: Annotated[
        str,
        typer.Argument(metavar="[ID]", help="The backup; without, the one at --storage.", autocompletion=complete_id),
    ],
    second: Annotated[str | None, typer.Argument(metavar="KEY", help="The user key, as --format says.")] = None,
    form: FormatOption = KeyForm.RAW,
    value_form: Annotated[
        KeyForm | None, typer.Option("--value-format", help="How the value is written.", show_default="as --format")
    ] = None,
    keyspace: Annotated[
        int | None, typer.Option("--keyspace", min=0, metavar="ID", help="Where the backup has several keyspaces.")
    ] = None,
) -> None:
    """Write one value out of a backup to standard output; exit code 13 when it is not there."""
    backup_id, text = ("", first) if second is None else (first, second)
    try:
        key = parse_key(text, form.value)
    except InvalidKeyText as error:
        raise UsageError(f"KEY: {error}", hint=f"The key is read as --format {form.value}.") from None
    from tikv_br.proof.lookup import find_value

    found = find_value(session.backup(backup_id), key, keyspace)
    shown = format_key(key, KeyForm.HEX if form is KeyForm.HEX else KeyForm.ESCAPED)
    if found is None or found.stored.deleted:
        why = f" (deleted at ts {found.ts})" if found is not None else ""
        raise KeyNotFound(f"the backup has no key {shown}{why}", hint="Check the key and --format.")
    _write(session, key, found, value_form or form)


def _write(session: StorageSession, key: bytes, found: FoundValue, form: KeyForm) -> None:
    value, expire_ts, _deleted = found.stored
    expired = not found.stored.is_live(int(time.time()))
    if expired:
        log.warning("the value has expired, at %s UTC", utc(expire_ts * 1000))
    if session.output.is_json:
        pair = {"key": key.hex(), "value": value.hex(), "expire_ts": expire_ts, "ts": found.ts}
        session.output.result("pair", {**pair, "expired": expired, "file": found.file})
    elif form is KeyForm.RAW:
        session.output.data(value)
    else:
        session.output.row({}, format_key(value, form.value))
