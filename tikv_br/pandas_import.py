"""Delayed import of pandas, until PySpark needs it.

Arrow imports pandas, if it is installed, for its first array: that takes half a second, more than the rest of a small backup.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _NoPandas:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is only imported for PySpark", name=fullname)
        return None


_FINDER = _NoPandas()


def keep_out() -> None:
    """Make ``import pandas`` fail in this process until `allow`."""
    sys.meta_path.insert(0, _FINDER)


def allow() -> None:
    """Allow the import; idempotent."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
