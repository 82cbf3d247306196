"""tikv-br: back up, migrate, restore and tail TiKV RawKV clusters."""

__version__ = "0.1.0"
