"""Spark data sources, by PySpark's Python Data Source API: ``tikv``, a live cluster or the changes in a log, and ``tikv-backup``, a backup.

Modules, in reading order:

- options: reads the options
- rows: which keys are read, and how rows look in Spark
- live: reads and writes a cluster, by puts or by SSTs
- backups: reads a backup
- changes: streams the changes in a log archive

Imports backup, load, bulk_load and what they share; never the command line.
"""

from tikv_br.datasource.backups import TikvBackupDataSource
from tikv_br.datasource.live import TikvDataSource

__all__ = ["TikvBackupDataSource", "TikvDataSource"]
