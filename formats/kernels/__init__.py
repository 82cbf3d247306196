"""Loops over Arrow memory, compiled by numba: what the bulk paths of `formats` run on.

Nothing here allocates per row or trusts a length it has not compared with what is there; `addresses`, `foreign` and `memory`
check nothing, and are called for ranges that a kernel has proven. Imported late by modules that the control path loads, since
numba itself takes half a second.
"""
