"""One `Output` for every command: text for people or JSON lines for scripts, always on stdout.

Progress and logs go to stderr (see ``log.py`` and ``progress.py``), so that stdout can be piped. In JSON form every line
carries ``message_type``, ``schema_version`` and ``run_id``; only bulk rows (`row`) are bare objects. ``docs/cli-json.md`` lists them all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from tikv_br import run_id
from tikv_br.cli import log
from tikv_br.cli.options import OutputForm
from tikv_br.cli.text import plain_table
from tikv_br.errors import OutputClosed, OutputFailed

SCHEMA_VERSION = 1
"""Of all JSON lines; raised when a field goes or changes its meaning, not when one is added."""


class Output:
    """Writes results; every method raises `OutputClosed` when the reader has gone, else `OutputFailed` when it cannot write."""

    def __init__(self, form: OutputForm = OutputForm.CONSOLE, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.form = form

    @property
    def is_json(self) -> bool:
        """Whether scripts read along."""
        return self.form is OutputForm.JSON

    def result(self, message_type: str, fields: Mapping[str, object], text: str = "") -> None:
        """Write one result: a JSON line of ``fields``, or ``text`` for people (nothing if empty)."""
        if self.is_json:
            head = {"message_type": message_type, "schema_version": SCHEMA_VERSION, "run_id": run_id.current()}
            self.row({**head, **fields}, "")
        elif text and not _is_hushed(message_type):
            self._write(text + "\n")

    def row(self, fields: Mapping[str, object], text: str) -> None:
        """Write one of many rows: a bare JSON object, or a line of text."""
        self._write((json.dumps(fields, separators=(",", ":")) if self.is_json else text) + "\n")

    def lines(self, text: str) -> None:
        """Write ready lines (with their line ends) at once: the quick way for bulk rows."""
        self._write(text)

    def data(self, data: bytes) -> None:
        """Write bytes as they are, and a line end: for people's form only."""
        self.flush()
        try:
            self._stream.buffer.write(data + b"\n")
        except OSError as error:
            raise _failure(self._stream, error) from None

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
        """Write a table for people; nothing in JSON form, where the caller writes `result` lines instead."""
        if self.is_json:
            return
        if use_colour(self._stream):
            self._rich_table(columns, rows, title)
        else:
            self._write((f"{title}\n" if title else "") + plain_table(columns, rows) + "\n")

    def summary(self, fields: Mapping[str, object], shown: Mapping[str, str], *, title: str) -> None:
        """End a command: JSON ``message_type`` ``summary`` with ``fields``, or a table of ``shown`` for people."""
        if self.is_json:
            self.result("summary", fields)
        elif not _is_hushed("summary"):
            self.table(("what", "value"), list(shown.items()), title=title)
        self.flush()

    def flush(self) -> None:
        """Push out what is buffered."""
        try:
            self._stream.flush()
        except OSError as error:
            raise _failure(self._stream, error) from None

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            if self._stream.isatty() or self.is_json:
                self._stream.flush()
        except OSError as error:
            raise _failure(self._stream, error) from None

    def _rich_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, title=title or None, title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console(file=self._stream).print(table)


def _is_hushed(message_type: str) -> bool:
    """Whether people have asked not to be told that all went well; what they have asked for is told."""
    return message_type == "summary" and log.is_quiet()


def use_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose owner has not said NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _failure(stream: TextIO, error: OSError) -> OutputClosed | OutputFailed:
    """Point the stream at /dev/null, so that the interpreter's own flush at exit does not complain."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if isinstance(error, BrokenPipeError):
        return OutputClosed("standard output was closed before everything was written")
    return OutputFailed(f"standard output cannot be written: {error.strerror}")
