"""Says clearly when another package hides one of ours.

``incremental`` is also the import name of a package that Twisted brings. In one environment the two overwrite or shadow
each other, and the failure would come late and look like anything.
"""

from __future__ import annotations

import importlib

from tikv_br.errors import PackageClash

OURS = ("formats", "incremental")


def check_packages() -> None:
    """Raise `PackageClash` when a top-level package of ours is not ours. Costs the import of two empty modules."""
    for name in OURS:
        try:
            package = importlib.import_module(name)
        except ImportError as error:
            raise PackageClash(f"tikv-br's package `{name}` cannot be imported: {error}") from error
        if getattr(package, "__part_of__", None) != "tikv-br":
            place = getattr(package, "__file__", None) or "an unknown place"
            raise PackageClash(
                f"the package `{name}` at {place} is not tikv-br's: another distribution brings the same name"
            )
