"""Every error that tikv-br can exit with: one class per cause, each with its exit code and a default hint.

``docs/exit-codes.md`` is generated from these classes. All are imported from here.
"""

from tikv_br.errors.base import *  # noqa: F403
