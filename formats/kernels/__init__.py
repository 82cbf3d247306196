"""Loops over Arrow memory, compiled by numba: what `formats.rows`, `checksum` and `rawscan` run on.

Nothing here allocates per row or trusts a length it has not compared with what is there. Imported late by modules that
the control path loads, since numba itself takes half a second.
"""
