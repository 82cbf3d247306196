"""Compare a cluster with a backup by SQL: which keys are new, gone or changed since then.

python examples/compare_with_backup.py --pd 10.0.0.1:2379 --storage 's3://backups/2026-11-21?region=eu-west-1'
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

from tikv_br.datasource import TikvBackupDataSource, TikvDataSource

DIFFERENCES = """
    SELECT coalesce(now.key, before.key) AS key,
           CASE WHEN before.key IS NULL THEN 'new' WHEN now.key IS NULL THEN 'gone' ELSE 'changed' END AS what
    FROM now FULL OUTER JOIN before ON now.key = before.key
    WHERE NOT (now.value <=> before.value)
"""

parser = argparse.ArgumentParser(description="Compare a cluster with a backup.")
parser.add_argument("--pd", required=True, help="PD endpoints: host:port,…")
parser.add_argument("--storage", required=True, help="URL of the backup")
parser.add_argument("--keyspace", default="", help="id of the keyspace (API V2)")
parser.add_argument("--limit", type=int, default=20, help="keys to list of each kind (20)")
arguments = parser.parse_args()

spark = SparkSession.builder.appName("compare-with-backup").getOrCreate()
spark.dataSource.register(TikvDataSource)
spark.dataSource.register(TikvBackupDataSource)
chosen = {"keyspace": arguments.keyspace}
spark.read.format("tikv").options(pd=arguments.pd, **chosen).load().createOrReplaceTempView("now")
spark.read.format("tikv-backup").options(**chosen).load(arguments.storage).createOrReplaceTempView("before")
differences = spark.sql(DIFFERENCES).cache()
for count in differences.groupBy("what").count().orderBy("what").collect():
    print(f"{count['what']}: {count['count']}")
    keys = differences.where(differences.what == count["what"]).orderBy("key").limit(arguments.limit)
    for row in keys.collect():
        print(f"    {bytes(row['key'])!r}")
