"""The command line: parse, call one function of a lower floor, render what it returns.

One file a command, no logic; modules here import nothing heavy, so that ``--help`` is quick.
"""
