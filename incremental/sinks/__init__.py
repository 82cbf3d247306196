"""Where changes go: one module a kind of sink, all behind `base.Sink`.

No sink knows of feeds, checkpoints or safe points.
"""
