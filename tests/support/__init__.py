"""Helpers that several test packages share: clusters, servers, processes, waiting, damage and recordings."""
