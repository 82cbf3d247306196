"""How syncs are doing, for those who look on: over HTTP as metrics, JSON, health and a page that plots.

Nothing here changes a sync; ``server.py`` puts the parts together.
"""
