from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzzing import messages
from tests.fuzzing import run as fuzz_run
from tests.fuzzing.run import Died, main, run
from tests.fuzzing.target import Target

SEGFAULT = "import ctypes; ctypes.string_at(0)"


def test_a_process_that_dies_is_noticed() -> None:
    """A segmentation fault, an exception and a hang are distinguished from a tally."""
    python = [sys.executable, "-c"]
    assert run([*python, "print('{\"read\": 3}')"], 60) == Counter(read=3)
    fault = run([*python, SEGFAULT], 60)
    assert isinstance(fault, Died)
    assert fault.reason == "killed by SIGSEGV"
    raised = run([*python, "raise IndexError('far away')"], 60)
    assert isinstance(raised, Died)
    assert "far away" in raised.error
    hung = run([*python, "import time; time.sleep(60)"], 0.5)
    assert hung == Died("did not end within 0 s", "")


def test_the_input_that_killed_its_reader_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table under way when the process died is copied, and the run fails."""

    def die(command: list[str], _timeout: float) -> Died:
        Path(command[4], "current").write_bytes(b"the one")
        return Died("killed by SIGSEGV", "")

    monkeypatch.setattr(fuzz_run, "run", die)
    assert main(["--inputs", "10", "--seed", "3", "--keep", str(tmp_path)]) == 1
    assert (tmp_path / "fuzz-3.sst").read_bytes() == b"the one"
    assert "seed 3: killed by SIGSEGV" in capsys.readouterr().out


GUARDED = "from tests.fuzzing.messages import Guarded; view = Guarded(5000).hold(b'abc')"


def test_a_read_beyond_a_message_kills_the_process() -> None:
    """A message is placed so that a read of one byte too far crashes."""
    python, beyond = (
        [sys.executable, "-c"],
        "import ctypes; ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(view)), 4)",
    )
    assert run([*python, f"{GUARDED}; print('{{\"read\": %d}}' % (bytes(view) == b'abc'))"], 60) == Counter(read=1)
    fault = run([*python, f"{GUARDED}; {beyond}"], 60)
    assert isinstance(fault, Died)
    assert fault.reason == "killed by SIGSEGV"


@pytest.mark.parametrize("target", [messages.PAGE, messages.CDC], ids=["page", "cdc"])
def test_sound_messages_are_read(target: Target, tmp_path: Path) -> None:
    """The undamaged messages are accepted by the kernel or by protobuf, or refused as their errors require."""
    ends = {target.read(data) for data in target.sound(tmp_path)}
    assert ends >= {"by the kernel"}
    assert ends <= {"by the kernel", "by protobuf", "RegionErrorSeen", "RequestRefused"}
