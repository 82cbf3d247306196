"""A read-only web page of backups, log archives, syncs, drills and garbage collection.

Modules, in reading order:

- `sources`: reads one place each: an index of backups, a log archive, a status page, reports of drills, PD
- `model`: the values that the page shows
- `findings`: what needs attention, and what to do about it; pure
- `watcher`: reads all sources again and again, in threads, and makes the values of what was read
- `access`: who may see it
- `web`: paths, the page with its figures, and those for Prometheus; templates are in `pages`
"""
