"""Feed a Parquet table from the changes of a cluster: each version of the table has the rows of one time.

tikv-br log start --pd 10.0.0.1:2379 --storage s3://backups/log --id east     # writes the log, on any machine
python examples/feed_table_from_changes.py --log 's3://backups/log?region=eu-west-1' --log-id east --table /lake/users

Each micro-batch writes the next version as a folder of the table: the rows of the version before, with the changes merged by key. The newest
folder with a file _SUCCESS is the table. Stopped or killed at any time, the same command continues. With Delta Lake or Iceberg a MERGE INTO in
`merge` does the same without writing all rows again.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tikv_br.datasource import TikvDataSource

parser = argparse.ArgumentParser(description="Feed a Parquet table from the changes of a cluster.")
parser.add_argument("--log", required=True, help="URL of the log archive")
parser.add_argument("--log-id", default="default", help="name of the log (default)")
parser.add_argument("--table", required=True, type=Path, help="folder of the table and of the checkpoint")
parser.add_argument("--prefix", default="", help="only keys with this prefix")
parser.add_argument("--once", action="store_true", help="end when the table has what the log has now")
arguments = parser.parse_args()


def version(batch_id: int) -> Path:
    """The folder that a micro-batch writes; the same if it is repeated."""
    return arguments.table / f"version-{batch_id:09}"


def merge(changes: DataFrame, batch_id: int) -> None:
    """Write the next version of the table: of each key the newest row, unless it was deleted."""
    rows = changes.select("key", f.struct("ts", "op", "value", "expire_ts").alias("row"))
    if batch_id > 0:
        table = changes.sparkSession.read.parquet(str(version(batch_id - 1)))
        kept = table.select("key", f.struct("ts", f.lit("put").alias("op"), "value", "expire_ts").alias("row"))
        rows = rows.union(kept)
    newest = rows.groupBy("key").agg(f.max("row").alias("row")).where("row.op = 'put'")
    newest.select("key", "row.value", "row.expire_ts", "row.ts").write.mode("overwrite").parquet(str(version(batch_id)))
    shutil.rmtree(version(batch_id - 2), ignore_errors=True)  # the one before stays, for readers and for a repetition


spark = SparkSession.builder.appName("feed-table-from-changes").getOrCreate()
spark.dataSource.register(TikvDataSource)
options = {"log": arguments.log, "log_id": arguments.log_id, "prefix": arguments.prefix}
# Merged by key, versions that the log lacks do not matter: each micro-batch ends at a time for which it has the newest ones.
changes = spark.readStream.format("tikv").options(**options, allow_inexact="true").load()
trigger = {"availableNow": True} if arguments.once else {"processingTime": "30 seconds"}
query = (
    changes.writeStream.foreachBatch(merge)
    .option("checkpointLocation", str(arguments.table / "checkpoint"))
    .trigger(**trigger)
    .start()
)
query.awaitTermination()
