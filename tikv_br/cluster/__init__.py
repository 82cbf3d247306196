"""How to talk to PD and the stores: routing, retries, time, safe points and RawKV calls.

What lives here knows no backup, no storage and no command line; answers come back as values, failures as our errors.
"""
