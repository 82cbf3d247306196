"""Pure conversions between bytes and Arrow: keys, values, checksums, scan pages, change events, put requests, SSTs, Parquet.

No I/O, no gRPC, no clock, no randomness, and no import from the floors above.
"""

__part_of__ = "tikv-br"  # what tells this package from another of the same name (see tikv_br.cli.clash)
