from __future__ import annotations

from tikv_br.playground.store_state import TIMEOUT, StoreImportMode


def test_import_mode_ends_by_itself() -> None:
    """Ten minutes after the last switch the store is back to normal; each switch restarts them."""
    now = 1000.0
    mode = StoreImportMode(lambda: now)
    seen = [mode.importing]
    for passed in (TIMEOUT - 1, TIMEOUT - 1):
        mode.switch(importing=True)
        now += passed
        seen.append(mode.importing)
    now += 1
    seen.append(mode.importing)
    assert seen == [False, True, True, False]
