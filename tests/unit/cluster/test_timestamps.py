"""Times as people write them, as timestamps of PD."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from tikv_br.cluster.timestamps import compose, parse_ts, physical_ms, show_time, show_ts
from tikv_br.errors import UsageError

TEN = 1777716000_000
"""2026-05-02 10:00:00 UTC in milliseconds, as ``date -u -d '2026-05-02 10:00' +%s`` prints it."""


@pytest.mark.parametrize(
    "text",
    [
        "2026-05-02T10:00:00Z",
        "2026-05-02T12:00:00+02:00",
        "2026-05-02 10:00:00",
        "2026-05-02 10:00:00 UTC",
        " 2026-05-02T10:00 ",
        str(compose(TEN)),
    ],
)
def test_forms_of_one_time_have_one_timestamp(text: str) -> None:
    """A time without an offset is in UTC."""
    assert parse_ts(text, "--until") == compose(TEN)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(
            ("-2m", 120),
            ("2 minutes ago", 120),
            ("-90s", 90),
            ("1 hour ago", 3600),
            ("-3d", 259200),
            ("1 second ago", 1),
        ),
        *(("2m ago", 120), ("2M AGO", 120), ("-1h30m", 5400), ("1h 30m ago", 5400), ("1 day 2 hours ago", 93600)),
        *(("-1w", 604800), ("now", 0)),
    ],
)
def test_ages_count_from_now(text: str, seconds: int) -> None:
    """An age is as many seconds before now as it says."""
    before = time.time() * 1000
    found = physical_ms(parse_ts(text, "--until"))
    assert before - 1 <= found + seconds * 1000 <= time.time() * 1000 + 1


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("yesterday", "2026-05-05 00:00"),
        ("Yesterday 14:30", "2026-05-05 14:30"),
        ("yesterday at 14:30:05", "2026-05-05 14:30:05"),
        ("yesterday 23:30+02:00", "2026-05-05 21:30"),
        ("today 01:00 UTC", "2026-05-06 01:00"),
        ("tuesday", "2026-05-05 00:00"),
        ("wed 09:00", "2026-04-29 09:00"),
        ("last Thursday", "2026-04-30 00:00"),
    ],
)
def test_days_count_from_now_in_utc(text: str, moment: str) -> None:
    """Now is a Wednesday; a weekday is before today."""
    now = datetime(2026, 5, 6, 12, tzinfo=UTC).timestamp()
    expected = datetime.fromisoformat(f"{moment}+00:00").timestamp()
    assert physical_ms(parse_ts(text, "--until", lambda: now)) == expected * 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "then",
        "2m",
        "-2",
        "- 2m ago",
        "someday",
        "tomorrow",
        "monday 25:00",
        "last",
        "yesterday noon",
        "-1h30",
        "2 fortnights ago",
        "-99999999d",
        "0",
        "2026-05-02",
        "1969-01-01 10:00",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    """The message has the flag and the text."""
    with pytest.raises(UsageError, match="--until"):
        parse_ts(text, "--until")


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (0, "0 s ago"),
        (119, "119 s ago"),
        (245, "4 min ago"),
        (5 * 3600, "5 h ago"),
        (3 * 86400, "3 days ago"),
        (-600, "in 10 min"),
    ],
)
def test_times_are_shown_with_their_age(seconds: int, age: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One form everywhere: the second in UTC, and how long ago it was by this machine's clock; beside a timestamp as well."""
    monkeypatch.setattr(time, "time", lambda: TEN / 1000 + seconds)
    assert show_time(TEN + 123 if seconds > 0 else TEN) == f"2026-05-02 10:00:00 UTC ({age})"
    assert show_ts(compose(TEN)) == f"{compose(TEN)} = 2026-05-02 10:00:00 UTC ({age})"


def test_texts_that_are_kept_have_no_age() -> None:
    """Reports and records are read later; a time that is not known is a dash."""
    assert show_ts(compose(TEN), age=False) == f"{compose(TEN)} = 2026-05-02 10:00:00 UTC"
    assert show_time(0) == "-"
