from __future__ import annotations

import re
from pathlib import Path

from tests.unit.formats.examples import CI_EXAMPLES


def test_ci_looks_at_a_hundred_thousand_examples() -> None:
    """The property tests of the codecs add up to at least 100,000 examples under the profile of CI."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    weights = [int(weight) for text in texts for weight in re.findall(r"^@many\((\d+)\)$", text, re.MULTILINE)]
    assert sum(weights) * CI_EXAMPLES >= 100_000
