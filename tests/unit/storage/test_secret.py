from __future__ import annotations

import copy
import json
import logging
import pickle

import pytest

from tikv_br.storage.crypter import SecretText


def test_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    """No usual way of turning a value into text gives the secret, and JSON refuses it."""
    secret = SecretText("hush-hush")
    logging.getLogger("test").warning("%s %r %s", secret, secret, {"key": secret})
    shown = f"{secret} {secret!r} {[secret]} " + caplog.text
    assert "hush" not in shown
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_travels_and_compares() -> None:
    """Pickle and copy carry the text; equality and hash are by text; the empty one is false."""
    secret = SecretText("hush-hush")
    for other in (pickle.loads(pickle.dumps(secret)), copy.deepcopy(secret)):
        assert other.reveal() == "hush-hush"
        assert other == secret
        assert hash(other) == hash(secret)
    assert secret != SecretText("other")
    assert secret != "hush-hush"
    assert not SecretText()
    assert str(SecretText()) == ""
