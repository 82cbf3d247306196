"""Flags of ``tikv-br load raw`` that do not go together."""

from __future__ import annotations

import pytest

from tikv_br.cli.main import run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "Missing option '--staging'."),
        (("--mode", "put", "--staging", "/x", "--no-resume"), "--staging, --no-resume: not with --mode put"),
        (("--staging", "/x", "--order-column", "n"), "--on-duplicate last and --order-column need each other"),
        (("--staging", "/x", "--input-option", "sep"), "--input-option 'sep' is not KEY=VALUE"),
        (("--staging", "/x", "--spark-master", "nowhere"), "invalid Spark master 'nowhere'"),
    ],
)
def test_flags_that_do_not_fit(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 before anything is read or asked."""
    assert run(["load", "raw", "--input", "/no.csv", "--key-column", "a", "--value-column", "b", *flags]) == 2
    assert message in capsys.readouterr().err
