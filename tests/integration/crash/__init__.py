"""The crash matrix: every step boundary of every operation, broken in every way, and the operation run again.

`cells` makes the cells of the actual lists of steps, so that a new step is covered from its first day. Nothing is planted in
the product: it is broken through the reporter that each operation takes, or by patches within a process made to die.
"""
