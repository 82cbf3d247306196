"""List the largest values of a range of keys, with the bytes that each has.

python examples/find_oversized.py --pd 10.0.0.1:2379 --prefix user: --bytes 1048576
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tikv_br.datasource import TikvDataSource

parser = argparse.ArgumentParser(description="List the largest values of a range of keys.")
parser.add_argument("--pd", required=True, help="PD endpoints: host:port,…")
parser.add_argument("--keyspace", default="", help="keyspace, by id or name (API V2)")
parser.add_argument("--prefix", default="", help="only keys that begin with this text")
parser.add_argument("--bytes", type=int, default=1 << 20, help="smallest size to list (1 MiB)")
parser.add_argument("--limit", type=int, default=20, help="values to list (20)")
arguments = parser.parse_args()

spark = SparkSession.builder.appName("find-oversized").getOrCreate()
spark.dataSource.register(TikvDataSource)
options = {"pd": arguments.pd, "keyspace": arguments.keyspace, "prefix": arguments.prefix}
rows = spark.read.format("tikv").options(**options).load()
sizes = rows.select("key", f.octet_length("value").alias("size")).where(f.col("size") >= arguments.bytes)
for row in sizes.orderBy(f.desc("size"), "key").limit(arguments.limit).collect():
    print(f"{row['size']:>12} {bytes(row['key'])!r}")
