"""A line for cron and units for systemd that run a drill or a backup. Pure: nothing is installed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from tikv_br.errors import UsageError

_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_DAYS = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_SHORT = tuple(day[:3] for day in _DAYS)


def crontab(command: Sequence[str], at: str, day: str = "") -> str:
    """A line for ``crontab -e``. Cron mails the output: nothing unless the command fails or warns. Raises `UsageError`.

    ``day`` is a day of the week, or of the month as a number; ``""`` = every day.
    """
    hour, minute = _clock(at)
    date = str(_day_of_month(day)) if day.strip().isdecimal() else "*"
    weekday = str(_SHORT.index(_weekday(day))) if day and date == "*" else "*"
    # Cron ends the command at an unescaped %.
    return f"{minute} {hour} {date} * {weekday} {shlex.join([*command, '--quiet'])}".replace("%", r"\%") + "\n"


def systemd(command: Sequence[str], at: str, day: str = "") -> str:
    """A service and a timer, each with the path of its file. ``day`` is as for `crontab`. Raises `UsageError`."""
    hour, minute = _clock(at)
    date = f"{_day_of_month(day):02d}" if day.strip().isdecimal() else "*"
    weekday = f"{_weekday(day).capitalize()} " if day and date == "*" else ""
    # % begins a specifier, $ a variable.
    line, name = " ".join(_quoted(word) for word in command), command[1]
    description = f"[Unit]\nDescription={name.capitalize()} of tikv-br"
    return (
        f"# /etc/systemd/system/tikv-br-{name}.service\n"
        f"{description}\nAfter=network-online.target\nWants=network-online.target\n\n"
        f"[Service]\nType=oneshot\nExecStart={line}\n# Time to clean up.\nTimeoutStopSec=10min\n\n"
        f"# /etc/systemd/system/tikv-br-{name}.timer\n{description}\n\n"
        f"[Timer]\nOnCalendar={weekday}*-*-{date} {hour:02d}:{minute:02d}:00\nPersistent=true\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )


def _clock(text: str) -> tuple[int, int]:
    found = _TIME.fullmatch(text)
    if found is None:
        raise UsageError(f"--at must be a time such as 03:30, not {text!r}")
    return int(found[1]), int(found[2])


def _day_of_month(text: str) -> int:
    """1 to 28: each month has such a day."""
    day = int(text)
    if not 1 <= day <= 28:
        raise UsageError(f"--on {day} is not a day of every month: pass 1 to 28")
    return day


def _weekday(text: str) -> str:
    day = text.strip().lower()
    if day not in {*_DAYS, *_SHORT}:
        raise UsageError(
            f"--on must be one day of the week such as sunday, or of the month such as 1, not {text!r}",
            hint="Print one line per day.",
        )
    return day[:3]


def _quoted(word: str) -> str:
    escaped = word.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return escaped if re.fullmatch(r"[\w@+=:,./%$-]+", escaped) else f'"{escaped}"'
