"""``python -m tests.integration.change_query LOG CHECKPOINT OUTPUT``: a streaming query that runs until it is killed."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tikv_br.datasource import TikvDataSource

LOG_ID = "changes"


def start(spark: SparkSession, log: str, checkpoint: str, output: str, *, available_now: bool) -> StreamingQuery:
    """Append all changes in a log to a Parquet table."""
    spark.dataSource.register(TikvDataSource)
    changes = (
        spark.readStream.format("tikv")
        .options(log=log, log_id=LOG_ID, allow_inexact="true", max_bytes_per_batch="8000")
        .load()
    )
    writer = changes.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="1 second")
    return writer.start(output)


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    start(session, *sys.argv[1:4], available_now=False).awaitTermination()
