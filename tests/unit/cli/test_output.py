"""Both forms of output, and a reader that goes away."""

from __future__ import annotations

import io
import json
import os
import socket
from types import SimpleNamespace

import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import Py4JJavaError

from tests.support.tools import Terminal
from tikv_br import run_id
from tikv_br.cli.main import run
from tikv_br.cli.output import Output, OutputForm, failure_of, listed, use_colour
from tikv_br.cli.progress import describe
from tikv_br.errors import OutputClosed
from tikv_br.progress_events import Notice, StepUndone


def test_json_lines_carry_their_type_and_rows_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results begin with type, version and the run's id; bulk rows are bare objects; tables are for people only."""
    monkeypatch.setattr(run_id, "current", lambda: "0123456789abcdef")
    stream = io.StringIO()
    output = Output(OutputForm.JSON, stream)
    output.result("checksum", {"total_kvs": 1}, "for people")
    output.row({"key": "6b"}, "for people")
    output.table(("a",), [("b",)])
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    common = {"schema_version": 2, "run_id": "0123456789abcdef"}
    assert lines == [
        {"message_type": "checksum", **common, "total_kvs": 1},
        {"key": "6b"},
    ]


def test_console_form_has_text_only() -> None:
    """People get the text, and nothing where there is none."""
    stream = io.StringIO()
    output = Output(OutputForm.CONSOLE, stream)
    output.result("put", {"key": "6b"})
    output.result("ttl", {"ttl": 0}, "never")
    output.row({"key": "6b"}, "k\tv")
    output.result("summary", {"keys": 2}, listed("Done", [("keys", "2"), ("expired", "")], width=6))
    assert stream.getvalue() == "never\nk\tv\nDone\n  keys   2\n"


def test_colour_is_for_terminals_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR and dumb terminals get none."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    assert use_colour(stream)
    assert not use_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour(stream)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not use_colour(stream)


def test_tables_fit_the_terminal_and_are_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal has 80 columns if it says nothing, ``COLUMNS`` overrides it, and a pipe has no limit."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def shown(stream: io.StringIO) -> list[str]:
        Output(OutputForm.CONSOLE, stream).table(("id", "path"), [("a", "x" * 100)], drop=("path",))
        return stream.getvalue().splitlines()

    assert shown(Terminal()) == ["id", "a", "(not shown: path; they need a wider terminal or --output json)"]
    assert shown(io.StringIO())[1] == f"a   {'x' * 100}"
    monkeypatch.setenv("COLUMNS", "120")
    assert shown(Terminal())[1] == f"a   {'x' * 100}"


@pytest.mark.parametrize("form", list(OutputForm))
def test_reader_that_has_gone_is_an_error_of_ours(form: OutputForm) -> None:
    """Writing into a closed pipe ends in `OutputClosed`, and closing the stream afterwards is quiet."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        output = Output(form, stream)
        with pytest.raises(OutputClosed):
            output.lines("x" * 100_000)


def test_an_error_whose_text_cannot_be_read_is_reported() -> None:
    """The text of py4j's errors is asked of the JVM: once that is dead, asking raises another error."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client = GatewayClient(address="127.0.0.1", port=closed.getsockname()[1])
        error = Py4JJavaError("", SimpleNamespace(_target_id="o1", _gateway_client=client))
        with pytest.raises(Exception, match=r"."):
            str(error)
        assert failure_of(error).message.startswith(
            "unexpected Py4JJavaError: its text cannot be read, as that raised "
        )


def test_a_missing_option_is_named_with_what_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the missing option, the next a value for it."""
    assert run(["log", "status"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "Error: --storage is missing",
        "Hint: Pass --storage URL or set TIKV_BR_STORAGE. See `tikv-br log status --help`.",
    ]


def test_values_of_records_cannot_control_the_terminal() -> None:
    """In cells, pairs and texts: a line break in a value makes no further line, an escape sequence is shown."""
    stream = io.StringIO()
    out = Output(stream=stream)
    hostile = "a\n\x1b[2Jb\x9b1m\u202e"
    out.table(("id", "path"), [("1", hostile), ("2", "b")])
    out.pairs([("path", hostile)])
    out.result("summary", {}, "one\x1b[31m\ntwo")
    out.row({}, "row\x07")
    assert stream.getvalue().splitlines() == [
        "id  path",
        r"1   a\n\x1b[2Jb\x9b1m\u202e",
        "2   b",
        r"path  a\n\x1b[2Jb\x9b1m\u202e",
        r"one\x1b[31m",
        "two",
        r"row\x07",
    ]


def test_events_are_one_line_each() -> None:
    """Notices repeat names from records of others."""
    assert describe(Notice("from\n\x1b[2Jhost")) == r"from\n\x1b[2Jhost"
    assert describe(StepUndone("x", "why\rnot")) == r"NOT undone: x: why\rnot"
