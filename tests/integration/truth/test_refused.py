"""Each command against each thing that can be wrong: the code is the documented one, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer.main
from typer.core import TyperOption

from tests.integration.truth.calls import CALLS
from tests.integration.truth.conftest import World, check_failure, tikv_br
from tests.integration.truth.faults import FAULTS, Fault, refusing
from tikv_br.cli.command import CommandPath, leaves
from tikv_br.cli.main import app

COMMANDS = {path: command for path, command in leaves(typer.main.get_command(app)) if not command.hidden}
FREE = (str, list[str], bool)
"""Types of flags for which any text is valid, or which take none."""


@pytest.fixture(scope="module")
def refuser() -> Iterator[str]:
    """An S3 endpoint that refuses all."""
    with pytest.MonkeyPatch.context() as patch, refusing() as address:
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        yield address


def test_every_command_is_here() -> None:
    """A new command must define its call, or its exit codes are unknown."""
    assert COMMANDS.keys() == {tuple(word for word in path if not word.startswith("-")) for path in CALLS}


@pytest.mark.parametrize("form", ["json", "console"])
def test_wrong_flags(world: World, form: str) -> None:
    """A flag that there is none of, for each command; for each flag with a type, at the first that has it, a value that is none."""
    before, seen = world.picture(), set[str]()
    for command, leaf in COMMANDS.items():
        check_failure(tikv_br(*command, "--nonsense", "--output", form), 2, f"{command}", is_json=form == "json")
        flags = [param for param in leaf.params if isinstance(param, TyperOption)]
        typed = [flag for flag in flags if flag.type_descriptor.annotation not in FREE]
        for option in [flag for flag in typed if flag.opts[0] not in seen and form == "json"]:
            seen.add(option.opts[0])
            ended = world.call(command, "--output", form, option.opts[0], "no/such\0value")
            check_failure(ended, 2, f"{command} {option.opts[0]}", is_json=form == "json" and option.name != "output")
    assert (len(seen) > 30) is (form == "json")
    assert world.picture() == before


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_faulty_inputs_have_their_exit_codes(world: World, refuser: str, fault: Fault) -> None:
    """Clusters, stores of backups and backups with faults; alternately on the console and as JSON."""
    before, asked = world.picture(), list[CommandPath]()
    for command in fault.concerned(world):
        form = ("json", "console")[(FAULTS.index(fault) + len(asked)) % 2]
        more = (word.format(s3=refuser) for word in fault.more)
        ended = world.call(command, *more, "--output", form, **fault.instead(world))
        asked.append(command)
        if fault.code_of(command):
            check_failure(ended, fault.code_of(command), f"{fault}: {command}", is_json=form == "json")
        else:
            assert (ended.code, "Error" in ended.err) == (0, False), (fault, command, ended)
    assert asked
    assert world.picture() == before
