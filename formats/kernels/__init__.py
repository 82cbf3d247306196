"""Loops over Arrow memory, compiled by numba, mostly beforehand: the bulk paths of `formats`.

Kernels allocate nothing per row and check every length before they use it. `addresses` and `memory` check nothing;
kernels call them for ranges that they have checked. Modules of the control path import kernels late, since numba takes half a
second to import.

Modules, in reading order:

- `addresses`, `memory`: raw memory, copies and numbers
- `rows`: keys and values between user and storage form
- `order`: the order of keys, and which are equal
- `mvcc`: rows of the column families of transactions
- `checksum`: XOR of rows for the checksum
- `rawscan`, `rawput`, `cdc`: parsing and writing protobuf messages
"""

import tikv_br.formats.jit  # noqa: F401 - before anything else imports numba: it says for which processor that compiles
