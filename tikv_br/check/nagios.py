"""Results as a plug-in of Nagios (and Icinga, Naemon, Sensu …) writes them: one line, figures behind a bar."""

from __future__ import annotations

from collections.abc import Sequence

from tikv_br.check.probe import Figure, Result, Status, listed
from tikv_br.check.run import count

OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
"""Exit codes of a plug-in; the words of the line are the same."""
NAME = "TIKV-BR"


def state(results: Sequence[Result]) -> int:
    """The exit code: the worst of all probes; nothing told at all is unknown."""
    counted = count(results)
    if counted[Status.FAIL]:
        return CRITICAL
    if counted[Status.WARN]:
        return WARNING
    return OK if counted[Status.OK] else UNKNOWN


def line(results: Sequence[Result]) -> str:
    """The one line: state, what is wrong, how many are well, and the figures."""
    word = ("OK", "WARNING", "CRITICAL", "UNKNOWN")[state(results)]
    counted = count(results)
    wrong = [
        f"{result.name}: {result.verdict.seen}"
        for status in (Status.FAIL, Status.WARN)
        for result in results
        if result.verdict.status is status
    ]
    told = [listed(wrong)] if wrong else []
    told.append(", ".join(f"{number} {status.value}" for status, number in counted.items() if number))
    figures = " ".join(_figure(figure) for result in results for figure in result.verdict.figures)
    return _plain(f"{NAME} {word} - {'; '.join(told)}") + (f" | {figures}" if figures else "")


def unknown(message: str) -> str:
    """The line of a check that could not be made."""
    return _plain(f"{NAME} UNKNOWN - {message}")


def _figure(figure: Figure) -> str:
    number = f"{figure.value:.0f}" if figure.unit == "B" else f"{figure.value:g}"
    limits = f";{figure.warn};{figure.critical}" if figure.warn or figure.critical else ""
    return f"'{figure.label}'={number}{figure.unit}{limits}"


def _plain(text: str) -> str:
    """Text without what ends the line or begins the figures."""
    return " ".join(text.split()).replace("|", "/")
