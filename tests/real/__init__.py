"""The tests that run on real servers as well: which they are, their table, and stand-ins for the servers."""
