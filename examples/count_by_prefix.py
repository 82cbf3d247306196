"""Count the keys of a cluster by their first bytes, most frequent first.

python examples/count_by_prefix.py --pd 10.0.0.1:2379 --length 4
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tikv_br.datasource import TikvDataSource

parser = argparse.ArgumentParser(description="Count the keys of a cluster by their first bytes.")
parser.add_argument("--pd", required=True, help="PD endpoints: host:port,…")
parser.add_argument("--keyspace", default="", help="keyspace, by id or name (API V2)")
parser.add_argument("--length", type=int, default=4, help="bytes of a prefix (4)")
parser.add_argument("--limit", type=int, default=20, help="prefixes to print (20)")
arguments = parser.parse_args()

spark = SparkSession.builder.appName("count-by-prefix").getOrCreate()
spark.dataSource.register(TikvDataSource)
rows = spark.read.format("tikv").option("pd", arguments.pd).option("keyspace", arguments.keyspace).load()
counts = rows.groupBy(f.hex(f.substring("key", 1, arguments.length)).alias("prefix")).count()
for row in counts.orderBy(f.desc("count"), "prefix").limit(arguments.limit).collect():
    print(f"{row['count']:>12} {bytes.fromhex(row['prefix'])!r}")
