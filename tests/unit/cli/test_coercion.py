"""How quickly commands begin and end; what our own conversion of flags gives, against Typer's for each parameter of each command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.core import TyperArgument, TyperOption

from tikv_br.cli.coercion import Plain, quicken
from tikv_br.cli.lazy import leaves
from tikv_br.cli.main import app

TEXTS = (
    "", "x", "auto", "AUTO", "hex", "json", "Json", "v2", "none", "true", "-", "a,b", "10%", "3/10", "7d", "90s", "5q", "1KiB", "10",
    "0", "1", "-1", "+1", " 1", "1_0", "01", "1.5", "1e3", "nan", "inf", "9" * 30, "-0", "\u0663", "local:///x", "\udcff",
)  # fmt: skip
OTHERS: tuple[object, ...] = (None, 0, 1, 7, -3, 1.5, 2.0, True, [], ["a"], ["a", "1"], ("1", "2"), [1], b"x", object)


def parameters() -> Iterator[tuple[str, TyperOption | TyperArgument, typer.Context]]:
    """Each parameter of each command, those of one form once."""
    seen = set()
    for path, command in leaves(typer.main.get_command(app)):
        context = typer.Context(command, info_name=path[-1])
        for param in command.params:
            assert isinstance(param, (TyperOption, TyperArgument))
            kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
            form = (str(kind), str(info.parser), info.min, info.max, info.clamp, param.nargs, info.case_sensitive)
            if form not in seen:
                seen.add(form)
                yield f"{' '.join(path)} {param.name}", param, context


def outcome(converter: Any, value: Any, param: Any, context: Any) -> object:  # noqa: ANN401 - whatever Typer takes
    """What comes of a value: type and value, or what is said of it."""
    try:
        found = converter.coerce(value, param=param, ctx=context)
    except Exception as error:  # noqa: BLE001 - all of them are compared
        return type(error), str(error)
    return type(found), repr(found)


def test_each_parameter_takes_what_typer_takes() -> None:
    """Same value, same type, and of what is wrong the same message; the values that commands have by default included."""
    count = 0
    for name, param, context in parameters():
        default = param.get_default(context)
        for value in (*TEXTS, *OTHERS, default):
            setattr(param, "_runtime_param", None)  # noqa: B010
            expected = outcome(param.get_runtime_param(), value, param, context)
            setattr(param, "_runtime_param", None)  # noqa: B010
            quicken(context.command)
            ours = param.get_runtime_param()
            assert isinstance(ours, Plain)
            assert outcome(ours, value, param, context) == expected, f"{name} of {value!r}"
            count += 1
    assert count > 1000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["backup", "raw", "--help"],
        ["show", "-s", "/nosuch", "--output", "json", "--log-level", "error"],
        ["restore", "-u", "127.0.0.1:1", "-s", "/nosuch", "--ratelimit", "5", "--mode", "put", "--allow-overwrite"],
    ],
    ids=" ".join,
)
def test_pydantic_is_not_loaded(arguments: list[str]) -> None:
    """Not for what people say every day."""
    program = "import sys; from tikv_br.cli.main import run; run(sys.argv[1:]); sys.exit('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0


def test_only_a_process_of_its_own_ends_without_a_last_collection() -> None:
    """Called with arguments, as tests do, a command leaves the collector as it is; as the program it lets go of all."""
    program = (
        "import gc, sys; from tikv_br.cli.main import run; run(['--version']); before = gc.get_freeze_count();"
        "sys.argv = ['tikv-br', '--version']; run(); sys.exit(not before < gc.get_freeze_count() or before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0
