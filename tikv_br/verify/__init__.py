"""Proving a backup set, or a cluster against it.

Imports the engines and formats; changes nothing anywhere.
"""
