"""Reports of what a command or a drill did: what they are made of, their plots, and the pages they become.

Imports storage and backup sets; never the operations themselves.
"""
