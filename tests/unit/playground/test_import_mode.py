from __future__ import annotations

from tikv_br.playground.import_mode import TIMEOUT, ImportMode


def test_import_mode_ends_by_itself() -> None:
    """Ten minutes after the last switch the store is back to normal; each switch starts them anew."""
    now = 1000.0
    mode = ImportMode(lambda: now)
    assert not mode.importing
    mode.switch(importing=True)
    now += TIMEOUT - 1
    assert mode.importing
    mode.switch(importing=True)
    now += TIMEOUT - 1
    assert mode.importing
    now += 1
    assert not mode.importing


def test_import_mode_is_left() -> None:
    """By a switch to normal, or when its time is let run out."""
    mode = ImportMode()
    mode.switch(importing=True)
    mode.switch(importing=False)
    assert not mode.importing
    mode.switch(importing=True)
    mode.expire()
    assert not mode.importing
