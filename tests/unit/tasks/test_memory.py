from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from tikv_br.tasks.task import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    [bytearray(4 << 20) for _ in range(10)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Return how many pages of 4 KiB a process got from the kernel that takes and frees 40 MiB thirty times."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_used_again() -> None:
    """The process requests the memory of one round or two from the kernel, not of all thirty."""
    assert page_faults("keep") < 50_000 < page_faults("give back")
