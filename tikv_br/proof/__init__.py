"""Proving that a cluster holds what a backup holds, which restore and verify share; finding one row of a backup.

Imports the engines and ``formats``; not an operation. Changes nothing anywhere.
"""
