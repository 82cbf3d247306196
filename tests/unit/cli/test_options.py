"""Durations and sizes as people write them."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import typer.main
from typer.core import TyperOption

from tikv_br.archive.compact import CompactionOptions
from tikv_br.bulk_load.run import BulkLoadOptions
from tikv_br.bulk_load.stage import StageOptions
from tikv_br.cli.backup_cmd import RawBackupFlags, TxnBackupFlags
from tikv_br.cli.backup_flags import AzblobFlags, GcsFlags, S3Flags
from tikv_br.cli.changefeed_cmd import SETTINGS
from tikv_br.cli.command import REQUIRED, Flags, flag, flags_of, leaves
from tikv_br.cli.command import _Declaration as Declaration
from tikv_br.cli.command import _declarations as declarations
from tikv_br.cli.command import _fields as fields_of
from tikv_br.cli.diff_cmd import DiffFlags
from tikv_br.cli.drill_cmd import GoalFlags
from tikv_br.cli.key_flags import OneRangeFlags
from tikv_br.cli.kinds import RATE, SIZE, TIME, parse_duration, parse_rate_limit, parse_size
from tikv_br.cli.load_cmd import BulkLoadFlags
from tikv_br.cli.log_cmd import LogCompactFlags
from tikv_br.cli.main import app, run
from tikv_br.cli.restore_cmd import RawRestoreFlags, TxnRestoreFlags
from tikv_br.cli.verify_cmd import VerifyFlags
from tikv_br.dataflow.options import BackupOptions
from tikv_br.diff.places import DiffOptions
from tikv_br.drill.objectives import Objectives
from tikv_br.errors import UsageError
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.playground.settings import Settings
from tikv_br.restore.options import RestoreOptions
from tikv_br.storage.url import AzureOptions, GcsOptions, S3Options
from tikv_br.tasks.executor import ExecutorOptions
from tikv_br.tasks.inputs import Input
from tikv_br.verify.options import VerifyOptions


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1m", 60), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172_800), ("15", 15), ("1.5m", 90), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    """Every unit, compounds, fractions and plain seconds."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "1x", "1m30", "-5s", "1 m", "m1", "1h 30m", "nan"])
def test_no_durations(text: str) -> None:
    """Anything else is refused with examples."""
    with pytest.raises(typer.BadParameter, match="90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64KiB", 65536),
        ("64k", 65536),
        ("1.5MiB", 1_572_864),
        ("2GB", 2**31),
        ("1 t", 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Every unit, in any case, with or without i and B."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "1x", "-1", "1MiBs", "0x10"])
def test_no_sizes(text: str) -> None:
    """Anything else is refused with examples."""
    with pytest.raises(typer.BadParameter, match="16MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["36501d", "99999999999999999999s", "9" * 30, "9" * 400, "1h99999999d"])
def test_durations_too_long(text: str) -> None:
    """Durations beyond timers and timestamps are refused here, not by an overflow later."""
    with pytest.raises(typer.BadParameter, match=r"too long: pass at most 36500d"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["1025t", "9" * 30, "9" * 400, "9" * 30 + "GiB"])
def test_sizes_too_large(text: str) -> None:
    """Bytes are counted in 64 bits, and multiplied."""
    with pytest.raises(typer.BadParameter, match=r"too large: pass at most 1024TiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("10MiB", 10), ("10 mib/s", 10), ("512KiB", 0.5), ("1g", 1024), ("20m", 20), ("0B", 0)]
)
def test_rates_with_a_unit(text: str, rate: float) -> None:
    """As sizes, with or without the second; without a unit it is MiB, as in the Go tool."""
    assert parse_rate_limit(text) == rate * 2**20


@pytest.mark.parametrize("rate", ["", "MiB", "ten", "10MiB/h", "1KiBs"])
def test_no_rates(rate: str) -> None:
    """Anything else is refused with examples."""
    with pytest.raises(typer.BadParameter, match="use 10MiB"):
        parse_rate_limit(rate)


@pytest.mark.parametrize("rate", ["0", "0.001", "50", "1e3", "1048576"])
def test_rates(rate: str) -> None:
    """MiB come out as bytes. Zero is unlimited; a fraction of a MiB is a limit, too."""
    assert parse_rate_limit(rate) == math.ceil(float(rate) * 2**20)


@pytest.mark.parametrize(
    "rate", ["-1", "0.0000001", "1048577", str(2**44), "1e30", "inf", "-inf", "nan", "9" * 400, "9" * 400 + "MiB", "1B"]
)
def test_rates_out_of_range(rate: str) -> None:
    """A rate so low that a backup never ends, or that no request can carry, is refused with the range."""
    with pytest.raises(typer.BadParameter, match=r"out of range: pass 0 \(unlimited\), or 0\.001 to 1048576"):
        parse_rate_limit(rate)


COMMANDS = dict(leaves(typer.main.get_command(app)))


def is_parsed(option: TyperOption) -> bool:
    """Whether a duration, a size or a rate."""
    return option.callback is not None and option.metavar in {kind.metavar for kind in (TIME, SIZE, RATE)}


NUMERIC = [
    (path, param.opts[0])
    for path, command in COMMANDS.items()
    for param in command.params
    if isinstance(param, TyperOption) and (param.bare_type() in {"int", "float"} or is_parsed(param))
]


@pytest.mark.parametrize(
    ("path", "option"), NUMERIC, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_numeric_options_refuse_what_no_number_of_theirs_can_be(path: tuple[str, ...], option: str) -> None:
    """Every numeric option of every command: usage errors, or a number within the bounds that the option declares."""
    command = COMMANDS[path]
    param = next(param for param in command.params if option in param.opts)
    assert isinstance(param, TyperOption)
    if not is_parsed(param):
        assert param.min is not None, "no minimum"
        assert param.max is not None, "no maximum"
    for text in ("nan", "inf", "-inf", "-1", "1e30", str(2**64), "9" * 400):
        try:
            number = param.process_value(typer.Context(command), text)
        except typer.BadParameter:
            continue
        assert not is_parsed(param)
        assert param.min <= number <= param.max


def test_there_are_numeric_options() -> None:
    """The test above walks all of them."""
    assert {("backup", "raw"), ("sync",), ("raw", "import")} <= {path for path, _ in NUMERIC}
    assert len(NUMERIC) > 50


ODD = ("9" * 5000, "http://[::1", "\udcff\n{", "a=" * 3000)
SERVERS = {("playground", "start"), ("serve",), ("changefeed", "capture"), ("capture", "start")}


@pytest.mark.slow
def test_no_text_is_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option that takes a text, of the first command that has it; no cluster answers."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("TIKV_BR_PD", "127.0.0.1:1")
    seen: set[str] = set()
    for path, command in COMMANDS.items():
        options = [param for param in command.params if isinstance(param, TyperOption)]
        others = [param for param in command.params if param.required and not isinstance(param, TyperOption)]
        for option in options if path not in SERVERS else ():
            if option.is_flag or option.opts[0] in seen:
                continue
            seen.add(option.opts[0])
            needed = [word for each in options if each.required and each is not option for word in (each.opts[0], "x")]
            for text in ODD:
                code = run([*path, *(["x"] * len(others)), *needed, f"{option.opts[0]}={text}"])
                assert code != 1, (path, option.opts[0], text[:20], capsys.readouterr().err)
                capsys.readouterr()
    assert len(seen) > 150


@pytest.mark.parametrize(
    ("span", "bounds"),
    [("a:b", (b"a", b"b")), ("a:", (b"a", b"")), (":hex:00ff", (b"", b"\x00\xff")), (r"a\x3a:b", (b"a:", b"b"))],
)
def test_a_restore_takes_a_range(span: str, bounds: tuple[bytes, bytes]) -> None:
    """As a backup does: the same as --start and --end, which cannot be there too."""
    assert OneRangeFlags(span=span).key_range() == KeyRange(*bounds)
    with pytest.raises(UsageError, match="cannot be combined"):
        OneRangeFlags(span=span, start="a").key_range()


@pytest.mark.parametrize("span", ["a", "b:a", "hex:6b", "a:b:c"])
def test_a_restore_refuses_what_is_no_range(span: str) -> None:
    """Without an end, empty or ambiguous."""
    with pytest.raises(UsageError):
        OneRangeFlags(span=span).key_range()


def test_a_key_of_a_range_that_is_hex_too_is_noted() -> None:
    """As a key of --start."""
    noted: list[object] = []
    OneRangeFlags(span="1000:2000").notice(noted.append)
    assert len(noted) == 2
    assert "1000" in str(noted[0])


ONLY_RAW = {
    "dst_api_version",
    "allow_loss",
    "file_kind",
    "file_bytes",
    "safe_interval",
    "assume_no_ttl",
    "engine",
}
"""Options of backups of raw data."""
FILLED = {
    options.__name__: set(inspect.signature(options).parameters)
    for options in (
        BackupOptions,
        RestoreOptions,
        ExecutorOptions,
        VerifyOptions,
        DiffOptions,
        CompactionOptions,
        Input,
        StageOptions,
        BulkLoadOptions,
        Objectives,
        S3Options,
        Settings,
        GcsOptions,
        AzureOptions,
    )
} | {"UpdateFlags": {given for given, *_ in SETTINGS}}
"""The fields of what commands fill with flags of the same names, or by a table of names."""


@pytest.mark.parametrize(
    ("flags", "options", "others"),
    [
        (RawBackupFlags, BackupOptions, {"cluster", "file_kind", "key_mode", "lock_patience"}),
        (TxnBackupFlags, BackupOptions, {"cluster", "key_mode"} | ONLY_RAW),
        (
            RawRestoreFlags,
            RestoreOptions,
            {"cluster", "command", "key_mode", "by_name"},
        ),
        (
            TxnRestoreFlags,
            RestoreOptions,
            {"cluster", "command", "key_mode", "by_name", "mode", "restamp", "allow_followers"},
        ),
        (VerifyFlags, VerifyOptions, {"cluster", "by_name"}),
        (DiffFlags, DiffOptions, {"a", "b", "span"}),
        (LogCompactFlags, CompactionOptions, {"log_id", "until_ts", "rate_limit", "task_bytes", "file_bytes"}),
        (BulkLoadFlags, Input, {"path", "format", "reader_options", "csv"}),
        (BulkLoadFlags, StageOptions, {"clouds"}),
        (BulkLoadFlags, BulkLoadOptions, {"cluster", "stage"}),
        (GoalFlags, Objectives, set()),
        (S3Flags, S3Options, {"access_key", "secret_access_key", "session_token"}),
        (GcsFlags, GcsOptions, set()),
        (AzblobFlags, AzureOptions, {"sas_token"}),
    ],
)
def test_every_option_of_an_operation_has_a_flag(flags: type[Flags], options: type, others: set[str]) -> None:
    """`Flags.fill` goes by names: an option that is renamed alone would silently keep its default."""
    declared = {*every_field(flags), "spark_settings"}  # made of two flags
    assert set(inspect.signature(options).parameters) - others <= declared


def test_every_flag_of_every_command_has_a_consumer() -> None:
    """`Flags.fill` takes only names that fit: a flag that no option has, and that nobody reads, would have no effect.

    A module that declares a flag must read it, unless a callback or the options that it fills do.
    """
    unread = set()
    for path, command in COMMANDS.items():
        assert command.callback is not None
        function = inspect.unwrap(command.callback)
        flags = next(iter(inspect.signature(function, eval_str=True).parameters.values())).annotation
        classes = {flags, *classes_in(flags)}
        modules = {each.__module__ for known in classes for each in known.__mro__} | {function.__module__}
        used = {each for module in modules if module.startswith("tikv_br.cli.") for each in own_imports(module)}
        taken = set().union(*map(names_read, used))
        for known in classes:
            for name, (declaration, _) in declarations(known).items():
                callback = (
                    isinstance(declaration, Declaration)
                    and declaration.kind is None
                    and "callback" in declaration.attributes
                )
                if isinstance(declaration, Declaration) and not callback and name not in taken:
                    unread.add((" ".join(path), name))
    assert unread == set()


def own_imports(module: str) -> Iterator[str]:
    """A module, and those of the command line that it and they import at their top."""
    yield module
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tikv_br.cli."):
            yield from own_imports(node.module or "")


@functools.cache
def names_read(module: str) -> frozenset[str]:
    """The attributes that the code of a module reads, and the fields of the options that it fills."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"fill", "values"}:
            found |= {field for name in map(ast.unparse, node.args[:1]) for field in FILLED.get(name, ())}
    return frozenset(found)


def classes_in(flags: type[Flags]) -> Iterator[type[Flags]]:
    """The classes that stand for several flags of a command."""
    for hint in typing.get_type_hints(flags).values():
        if isinstance(hint, type) and issubclass(hint, Flags):
            yield hint
            yield from classes_in(hint)


def every_field(flags: type[Flags]) -> Iterator[str]:
    """The names of all fields, also of the classes that stand for several flags."""
    for name, hint in typing.get_type_hints(flags).items():
        yield name
        if isinstance(hint, type) and issubclass(hint, Flags):
            yield from every_field(hint)


def test_flags_by_hand() -> None:
    """A test, or other code, may leave out what has a default; a name that is wrong or lacks is an error."""

    class Base(Flags):
        first: int = flag(1, "first")
        seconds: float = flag("1m", "seconds", kind=TIME)

    class Inner(Base):
        second: int = flag(2, "second")
        many: list[str] = flag([], "many")

    class Other(Flags):
        inner: Inner = flags_of(Inner)
        first: int = flag(3, "first")
        third: int = flag(REQUIRED, "third")

    assert Base(first=6).values(Base) == {"first": 6, "seconds": 60.0}
    assert Other(third=7).values(Base) == {"first": 3, "seconds": 60.0}
    assert Other(third=7, inner=Inner(seconds=2.0)).replaced(third=8).inner.seconds == 2.0
    assert Inner().many is not Inner().many
    assert (Inner.second, Inner.seconds) == (2, 60.0)
    assert Inner(first=8) == Inner(first=8, second=2) != Inner(first=8, second=3)
    with pytest.raises(TypeError, match="needs third"):
        Other()
    with pytest.raises(TypeError, match="has no fourth"):
        Inner(fourth=4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Base().first = 2  # type: ignore[misc]


def test_own_flags_come_first_in_help_and_last_in_values() -> None:
    """A flag of a base that a class declares again is the class's own."""

    class Base(Flags):
        first: int = flag(1, "first")
        both: int = flag(2, "both")

    class Inner(Base):
        second: int = flag(3, "second")
        both: int = flag(4, "both")

    assert [name for name, *_ in fields_of(Inner)] == ["second", "both", "first"]
    assert list(Inner().values(Inner).items()) == [("first", 1), ("second", 3), ("both", 4)]
