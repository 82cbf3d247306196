"""Results as text for people or as JSON lines for scripts, always on stdout; keys, sizes, durations and tables as text.

Progress and logs go to stderr (see ``log.py`` and ``progress.py``), so that stdout can be piped. In JSON form every line
carries ``message_type``, ``schema_version`` and ``run_id``; only bulk rows (`row`) are bare objects. ``docs/cli-json.md`` lists them all.

Tables that fit the width of a terminal: no cell is cut. Prose wraps at words, other columns are left out with a note or stacked.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import typer

from tikv_br import run_id
from tikv_br.cli import log
from tikv_br.environment import failure_of_machine
from tikv_br.errors import Failure, Interrupted, OutputClosed, OutputFailed, TikvBrError, UsageError
from tikv_br.formats.errors import InvalidKeyText
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import format_key, parse_key, show_key
from tikv_br.formats.numbers import parse_decimal
from tikv_br.redaction import visible, visible_lines
from tikv_br.report import draft
from tikv_br.report.draft import Draft

LIST_WIDTH = 60
"""A terminal narrower than this gets a list of lines instead of a table without some columns."""
MIN_PROSE = 16
DEFAULT_WIDTH = 80
MAX_WIDTH = 100_000
GAP = 2


def width_of(stream: TextIO) -> int | None:
    """Columns of a terminal or of ``COLUMNS``; None = no limit, as in a pipe or a file."""
    if given := parse_decimal(os.environ.get("COLUMNS", ""), MAX_WIDTH):
        return given
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except OSError:  # a stream without a descriptor, as in tests
        return DEFAULT_WIDTH


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    prose: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> str:
    """Rows below their headings, in at most `width` columns where words and ids allow it.

    Cells of the columns `prose` wrap at words. If that is not enough, the columns `drop` are left out, first to last; if that is not
    enough either, or the terminal is narrow, each row becomes a list of lines.
    """
    names, dropped = list(columns), list[str]()
    rows = [[visible(cell) for cell in row] for row in rows]
    for candidate in ("", *drop):
        if candidate:
            names.remove(candidate)
            dropped.append(candidate)
        shown = [[row[columns.index(name)] for name in names] for row in rows]
        widths = _widths(names, shown, width, prose)
        if widths is not None:
            lines = [line for row in (names, *shown) for line in _lines(row, widths)]
            if dropped:
                lines += wrap(f"(not shown: {', '.join(dropped)}; they need a wider terminal or --output json)", width)
            return "\n".join(lines)
        if width is not None and width < LIST_WIDTH:
            break
    return "\n\n".join(pairs([pair for pair in zip(columns, row, strict=True) if pair[1]], width) for row in rows)


def pairs(rows: Sequence[tuple[str, str]], width: int | None = None, *, indent: int = 0, least: int = 0) -> str:
    """Names and values in two columns, the first at least `least` wide; long values wrap at words, below their beginning."""
    rows = [(visible(name), visible(value)) for name, value in rows]
    first = max([least, *(len(name) for name, _ in rows)])
    begin = indent + first + GAP
    if width is not None and begin > width // 2:  # no room beside the names
        begin = indent + GAP
    lines = []
    for name, value in rows:
        head, (start, *rest) = f"{'':{indent}}{name}", wrap(value, None if width is None else width - begin)
        if len(head) < begin:
            lines.append(f"{head:<{begin}}{start}")
        else:
            lines += [head, f"{'':{begin}}{start}"]
        lines += [f"{'':{begin}}{each}" for each in rest]
    return "\n".join(line.rstrip() for line in lines)


def wrap(text: str, width: int | None) -> list[str]:
    """Lines of at most `width` columns, or longer where a word is."""
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def _widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, prose: Sequence[str]
) -> list[int] | None:
    """Widths of columns; None if they do not fit."""
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    excess = sum(widths) + GAP * (len(widths) - 1) - width if width is not None else 0
    least = {
        i: max(min(MIN_PROSE, widths[i]), *(len(word) for row in (names, *rows) for word in row[i].split() or [""]))
        for i, name in enumerate(names)
        if name in prose
    }
    while excess > 0:  # the widest column gives way first
        shrinkable = [i for i in least if widths[i] > least[i]]
        if not shrinkable:
            return None
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
        excess -= 1
    return widths


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """A row as a line, or as several."""
    cells = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        (" " * GAP)
        .join(f"{cell[i] if i < len(cell) else '':<{width}}" for cell, width in zip(cells, widths, strict=True))
        .rstrip()
        for i in range(max(map(len, cells)))
    ]


SCHEMA_VERSION = 2
"""Version of all JSON lines; incremented when a field is removed or changes its meaning, not when one is added."""


class OutputForm(enum.StrEnum):
    """Format of results."""

    CONSOLE = "console"
    JSON = "json"


class KeyForm(enum.StrEnum):
    """Text format of keys; see `tikv_br.formats.keys.text`."""

    TEXT = "text"
    RAW = "raw"
    HEX = "hex"
    ESCAPED = "escaped"


_HINTS = {
    KeyForm.TEXT: r"Keys are text with \xNN escapes (write \\ for a backslash), or hex:…",
    KeyForm.HEX: "Keys are read as hex, because of --key-format hex or --format hex.",
    KeyForm.RAW: "Keys are read as they are, because of --key-format raw or --format raw.",
    KeyForm.ESCAPED: r"Keys are read as text with \xNN escapes, because of --key-format escaped or --format escaped.",
}


def failure_of(error: BaseException) -> Failure:
    """The error that the command line reports for any exception."""
    match error:
        case Failure():
            return error
        case typer.TyperException():
            return _usage_error(error)
        case KeyboardInterrupt() | typer.Abort():
            return Interrupted("interrupted")
        case _:
            return failure_of_machine(error) or TikvBrError(f"unexpected {type(error).__name__}: {_text(error)}")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - the text of some of py4j's is asked of the JVM, which may be dead
        return f"its text cannot be read, as that raised {type(second).__name__}"


def reporting(command: str, path: str) -> contextlib.AbstractContextManager[Draft]:
    """``--report``: see `tikv_br.report.draft.reporting`."""
    return draft.reporting(command, path, failure_of)


def _usage_error(error: typer.TyperException) -> UsageError:
    """Convert Typer's usage error to `UsageError`."""
    context: typer.Context | None = getattr(error, "ctx", None)
    hint = f"See `{context.command_path} --help`." if context is not None else None
    message = error.format_message()
    param = getattr(error, "param", None)
    if context is not None and message.startswith("Missing option") and param is not None:
        flag = max(param.opts, key=len)
        variable = f" or set {param.envvar}" if param.envvar else ""
        message = f"{flag} is missing"
        hint = f"Pass {flag} {param.metavar or 'VALUE'}{variable}. See `{context.command_path} --help`."
    if context is not None and message == context.get_help():  # a group without a command
        names = ", ".join(getattr(context.command, "commands", ()))
        message = f"{context.command_path} needs a command: {names}"
    return UsageError(message, hint=hint)


def confirmation(command: str, *, yes: bool) -> Callable[[str], None]:
    """A function that asks a question before `command` removes something, and raises `Interrupted` if the answer is no.

    With `yes` it does not ask. Raises `UsageError` if there is no terminal to ask at.
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"{command} asks before it removes anything, and there is no terminal", hint="Pass --yes.")

    def ask(question: str) -> None:
        if not yes and not typer.confirm(visible(question), err=True):
            raise Interrupted("nothing was removed")

    return ask


class Output:
    """Writes results; every method raises `OutputClosed` when the reader has gone, else `OutputFailed` when it cannot write."""

    def __init__(self, form: OutputForm = OutputForm.CONSOLE, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.form = form
        self.summary: Mapping[str, object] = {}
        """The fields of the last ``summary``, which hooks pass on."""

    @property
    def is_json(self) -> bool:
        """Whether results are JSON lines."""
        return self.form is OutputForm.JSON

    def result(
        self, message_type: str, fields: Mapping[str, object], text: str = "", *, decoration: bool = False
    ) -> None:
        """Write one result: a JSON line of ``fields``, or ``text`` for people (nothing if empty).

        --quiet hides the text of summaries and of `decoration`, which is beside what the command is for.
        """
        if message_type == "summary":
            self.summary = fields
        if self.is_json:
            head = {"message_type": message_type, "schema_version": SCHEMA_VERSION, "run_id": run_id.current()}
            self.row({**head, **fields}, "")
        elif text and not (log.is_quiet() and (decoration or message_type == "summary")):
            self._write(text + "\n")

    def row(self, fields: Mapping[str, object], text: str) -> None:
        """Write one of many rows: a bare JSON object, or a line of text."""
        self._write((json.dumps(fields, separators=(",", ":")) if self.is_json else text) + "\n")

    def lines(self, text: str) -> None:
        """Write ready lines (with their line ends) at once: the quick way for bulk rows, whose bytes are escaped already."""
        self._write(text, ready=True)

    def data(self, data: bytes) -> None:
        """Write bytes as they are, and a line end: for people's form only."""
        self.flush()
        try:
            self._stream.buffer.write(data + b"\n")
        except OSError as error:
            raise _failure(self._stream, error) from None

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        prose: Sequence[str] = (),
        drop: Sequence[str] = (),
        decoration: bool = False,
    ) -> None:
        """Write a table for people, see `table.table`; nothing in JSON form, where the caller writes `result` lines instead.

        For `decoration` see `result`.
        """
        if not (self.is_json or (decoration and log.is_quiet())):
            text = table(columns, rows, width_of(self._stream), prose=prose, drop=drop)
            self._write((f"{title}\n" if title else "") + text + "\n")

    def pairs(self, rows: Sequence[tuple[str, str]], *, title: str = "") -> None:
        """Write names and values for people, one below the other; nothing in JSON form."""
        if not self.is_json:
            text = pairs(rows, width_of(self._stream))
            self._write((f"{title}\n" if title else "") + text + "\n")

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            raise _failure(self._stream, error) from None

    def _write(self, text: str, *, ready: bool = False) -> None:
        try:
            self._stream.write(text if ready or self.is_json else visible_lines(text))
            if self._stream.isatty() or self.is_json:
                self._stream.flush()
        except OSError as error:
            raise _failure(self._stream, error) from None


def use_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _failure(stream: TextIO, error: OSError) -> OutputClosed | OutputFailed:
    _point_at_null(stream)
    if isinstance(error, BrokenPipeError):
        return OutputClosed("standard output was closed before everything was written")
    return OutputFailed(f"cannot write to standard output: {error.strerror}")


def drop_unwritten(stream: TextIO) -> None:
    """Discard what `stream` still buffers and cannot write, which would turn the exit code into 120."""
    try:
        stream.flush()
    except OSError:
        _point_at_null(stream)


def _point_at_null(stream: TextIO) -> None:
    """Point the stream at /dev/null, so that the interpreter's own flush at exit does not complain."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def human_bytes(count: float) -> str:
    """Bytes in powers of 1024 with one decimal: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """Seconds as ``0.42s``, ``12.3s``, ``4m05s`` or ``2h03m``."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


_LABELS = {
    "crc64xor": "checksum",
    "keyspace_id": "keyspace",
    "total_kvs": "total-kv",
    "total_bytes": "total-kv-size",
    "backup_size": "backup-data-size",
}


def label(name: str) -> str:
    """The name of a JSON field for people, the same as in summaries."""
    return _LABELS.get(name, name.removesuffix("_ms").removesuffix("_seconds").replace("_", "-"))


def picked(record: object, *names: str) -> dict[str, object]:
    """Attributes of an object as JSON fields of the same names."""
    return {name: getattr(record, name) for name in names}


def read_key(text: str, form: KeyForm, flag: str) -> bytes:
    """Parse a key. Raises `UsageError` naming the flag."""
    try:
        return parse_key(text, form.value)
    except InvalidKeyText as error:
        raise UsageError(f"{flag}: {error}", hint=_HINTS[form]) from None


def read_range(start: str, end: str, form: KeyForm) -> KeyRange:
    """Parse the range [start, end); an empty end means unbounded. Raises `UsageError` if the range is empty."""
    span = KeyRange(read_key(start, form, "--start"), read_key(end, form, "--end"))
    if span.is_empty:
        raise UsageError(
            f"--start {quote(span.start, form)} is not less than --end {quote(span.end, form)}",
            hint=r"START is inclusive, END exclusive; an empty END is no bound. In --range a colon of a key is written as \x3a.",
        )
    return span


def show(data: bytes, form: KeyForm) -> str:
    """Bytes as a person can read them in one line: hex if asked for, else as they can be passed to a command."""
    return format_key(data, KeyForm.HEX if form is KeyForm.HEX else KeyForm.TEXT)


def quote(key: bytes, form: KeyForm) -> str:
    """A key as `show`, cut for messages."""
    return show_key(key, KeyForm.HEX if form is KeyForm.HEX else KeyForm.TEXT)


def listed(title: str, rows: Sequence[tuple[str, str]], width: int = 18) -> str:
    """A title, and below it names and values in two columns, without those that are empty."""
    shown = [row for row in rows if row[1]]
    return f"{title}\n{pairs(shown, width_of(sys.stdout), indent=2, least=width - 1)}" if shown else title
