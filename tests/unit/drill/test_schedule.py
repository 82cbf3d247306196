from __future__ import annotations

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tikv_br.cli.main import run
from tikv_br.drill.schedule import crontab, systemd
from tikv_br.errors import UsageError

COMMAND = ["/opt/tikv br/bin/tikv-br", "drill", "run", "--config", "/etc/50%/drill.toml"]


def test_a_crontab_line_escapes_what_cron_and_the_shell_take_for_their_own() -> None:
    """Minute comes before hour; a percent sign, which ends a line of cron, is escaped, a space is quoted."""
    line = crontab(COMMAND, "03:05", "Sunday")
    assert line.startswith("5 3 * * 0 '/opt/tikv br/bin/tikv-br' drill run --config ")
    assert r"/etc/50\%/drill.toml" in line
    assert line.count("\n") == 1


def test_a_timer_names_its_day_and_the_service_its_command() -> None:
    """Both units stand under the names of their files; a percent sign is doubled for systemd."""
    units = systemd(COMMAND, "23:30", "mon")
    assert "OnCalendar=Mon *-*-* 23:30:00" in units
    assert 'ExecStart="/opt/tikv br/bin/tikv-br" drill run --config /etc/50%%/drill.toml' in units


@pytest.mark.parametrize(
    ("at", "day"),
    [
        ("24:00", ""),
        ("3:30", ""),
        ("03:60", ""),
        ("03:30", "noday"),
        ("03:30", "mon-fri"),
        ("03:30", "monday,thursday"),
    ],
)
def test_invalid_times_are_refused(at: str, day: str) -> None:
    """Neither form takes an hour, a minute or a day that does not exist."""
    for form in (crontab, systemd):
        with pytest.raises(UsageError):
            form(COMMAND, at, day)


def test_monthly() -> None:
    """A number is a day of the month; one that some months lack is refused."""
    assert crontab(COMMAND, "03:05", "1").startswith("5 3 1 * * ")
    assert "OnCalendar=*-*-15 03:05:00" in systemd(COMMAND, "03:05", "15")
    for form in (crontab, systemd):
        with pytest.raises(UsageError, match="1 to 28"):
            form(COMMAND, "03:05", "31")


def test_systemd_takes_the_units_that_are_printed(tmp_path: Path) -> None:
    """Each unit parses as an ini file with one ExecStart; where systemd is installed, its own verification finds nothing."""
    program = tmp_path / "a program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    printed = systemd([str(program), "drill", "run", "--config", "/etc/50%/drill.toml"], "03:30", "sun")
    for part in printed.split("# /etc/systemd/system/")[1:]:
        name, _, text = part.partition("\n")
        (tmp_path / name).write_text(text)
        unit = ConfigParser(interpolation=None, strict=True, comment_prefixes=("#",))
        unit.optionxform = str  # type: ignore[method-assign,assignment]
        unit.read_string(text)
        assert unit.has_option("Service", "ExecStart") == name.endswith(".service")
    units = sorted(str(path) for path in tmp_path.glob("tikv-br-drill.*"))
    assert [Path(unit).suffix for unit in units] == [".service", ".timer"]
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        done = subprocess.run([analyze, "verify", "--man=no", *units], capture_output=True, text=True, check=False)
        assert not [line for line in done.stderr.splitlines() if "tikv-br-drill" in line], done.stderr


def test_a_backup_is_scheduled_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Both forms have the flags behind ``--``, quoted; what `backup raw` would refuse each night is refused at once."""
    words = ["backup", "schedule", "--at", "02:00", "--on", "mon", "--print"]
    flags = ["--", "--pd", "10.0.0.1:2379", "--storage", "s3://backups/{time:%Y}", "--checksum"]
    assert run([*words, "crontab", *flags]) == 0
    line = capsys.readouterr().out
    assert line.startswith("0 2 * * 1 ")
    assert line.endswith(r" backup raw --pd 10.0.0.1:2379 --storage 's3://backups/{time:\%Y}' --checksum --quiet" "\n")
    assert run([*words, "systemd", *flags]) == 0
    units = capsys.readouterr().out
    assert "/etc/systemd/system/tikv-br-backup.timer\n" in units
    assert ' backup raw --pd 10.0.0.1:2379 --storage "s3://backups/{time:%%Y}" --checksum\n' in units
    assert run([*words, "crontab", *flags, "--chekcsum"]) == 2
    assert "No such option: --chekcsum" in capsys.readouterr().err
    assert run([*words, "crontab", "--", "--storage", "s3://backups/{date}/{keyspace}"]) == 2
    assert "must be in the last part of its path" in capsys.readouterr().err
