"""Tests of `tikv_br.archive`."""
