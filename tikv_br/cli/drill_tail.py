"""The options that have a drill follow the source, and what follows it: that lies above the drills."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.keys import read_key
from tikv_br.cli.option_groups import OptionGroup
from tikv_br.cli.options import KeyForm, parse_duration
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from incremental.rehearsal import SourceTail
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.drill.cleaning import Remover
    from tikv_br.drill.ledger import Kind
    from tikv_br.drill.tail import TailOptions

TailOption = Annotated[
    str,
    typer.Option(
        "--tail", metavar="TIME", help="Follow the source for so long after the restore, and rehearse the cut-over."
    ),
]
TailLagOption = Annotated[
    float,
    typer.Option(
        "--tail-lag",
        parser=parse_duration,
        metavar="TIME",
        show_default="10s",
        help="How near the target has to be before the cut-over.",
    ),
]
TailPatienceOption = Annotated[
    float,
    typer.Option(
        "--tail-patience",
        parser=parse_duration,
        metavar="TIME",
        show_default="5m",
        help="How long to wait for that, and for the last write.",
    ),
]
CanaryOption = Annotated[
    str,
    typer.Option(
        "--canary",
        metavar="KEY",
        help="A key that the source has not: written there while it is followed, then removed.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailFlags(OptionGroup):
    """Whether and how the source is followed."""

    tail: TailOption = ""
    tail_lag: TailLagOption = 10.0
    tail_patience: TailPatienceOption = 300.0
    canary: CanaryOption = ""

    def options(self, source: ClusterConfig, form: KeyForm) -> TailOptions | None:
        """What they say; None = the source is not followed. Raises `UsageError`."""
        if not self.tail:
            if self.canary:
                raise UsageError("--canary is a write that --tail follows, and there is none")
            return None
        from tikv_br.drill.tail import TailOptions

        canary = read_key(self.canary, form, "--canary")
        return TailOptions(_tail(source), parse_duration(self.tail), self.tail_lag, self.tail_patience, canary)

    def removers(self, source: ClusterConfig) -> dict[Kind, Remover]:
        """How to remove what the tails of earlier drills have left."""
        from tikv_br.drill.ledger import Kind

        return {Kind.TAIL: _tail(source)}


def _tail(source: ClusterConfig) -> SourceTail:
    from incremental.rehearsal import SourceTail

    return SourceTail(source, Path(tempfile.gettempdir()))
