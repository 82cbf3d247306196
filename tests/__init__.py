"""The tests: unit (pure), golden (recorded from real servers), integration (servers), e2e (the command line)."""
