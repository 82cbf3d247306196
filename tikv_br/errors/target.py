"""Trouble with the target of a restore, and what commands that look for trouble have found."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


class RestoreError(TikvBrError):
    """Trouble with the target of a restore."""


class TargetNotEmpty(RestoreError):
    """The target range already holds data."""

    exit_code = 40
    default_hint = "Restore into an empty range, or say --allow-overwrite."


class ChecksumMismatch(RestoreError):
    """The cluster's data differ from the backup's."""

    exit_code = 41
    default_hint = "Do not use the target before the cause is known: were there writes or expired keys meanwhile?"


class DrillRemains(RestoreError):
    """What a drill was to make or to remove is, or may be, somebody else's."""

    exit_code = 42
    default_hint = "Nothing of it was touched; look at it, and remove by hand what is of no use."


class FoundSomething(TikvBrError):
    """A command that looks for trouble did its work, and found some."""


class DifferencesFound(FoundSomething):
    """What was compared is not equal."""

    exit_code = 60
    default_hint = "The ranges and keys are listed; `--repair` puts them right in the second."


class ProbesFailed(FoundSomething):
    """A probe of `check` has failed."""

    exit_code = 61
    default_hint = "Do what stands beside the failed probes, then check again."


class ObjectivesMissed(FoundSomething):
    """A drill's recovery worked, and missed what was asked of it."""

    exit_code = 62
    default_hint = "The report says how each figure was measured, and where the time went."


class DamageNotFound(FoundSomething):
    """A drill damaged a copy of a backup on purpose, and that was not found."""

    exit_code = 63
    default_hint = "This is a defect of tikv-br: please report it, with the drill's report."


class CutOverFailed(FoundSomething):
    """A drill's rehearsed cut-over did not come about."""

    exit_code = 65
    default_hint = "Look at the lag of a sync of this source: docs/monitoring.md says what it depends on."


class HandOverNotRefused(FoundSomething):
    """A drill let GC pass a backup, and a sync from it would begin all the same."""

    exit_code = 64
    default_hint = "This is a defect of tikv-br: please report it, with the drill's report."
