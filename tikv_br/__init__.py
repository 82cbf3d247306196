"""tikv-br: back up, migrate, restore and tail TiKV RawKV clusters."""

__version__ = "1.0.0rc1"
