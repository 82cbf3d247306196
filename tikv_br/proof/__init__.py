"""Proving that a cluster holds what a backup holds; restore and verify share it.

Imports the engines and ``formats``; not an operation. Changes nothing anywhere.
"""
