"""Pure conversions between bytes and Arrow: keys, values, checksums, scan pages, SSTs.

No I/O, no gRPC, no clock, no randomness, and no import from the floors above.
"""
