"""tikv-br under spark-submit, which chooses the master and ships the environment.

spark-submit --master spark://host:7077 --archives tikv-br.tar.gz#environment --conf spark.pyspark.python=./environment/bin/python \
    --conf spark.pyspark.driver.python=python3 tikv_br_main.py backup raw --pd 10.0.1.1:2379 -s s3://backups/monday --executor spark
"""

from __future__ import annotations

import sys

from tikv_br.cli.spark_cmd import run_submitted

if __name__ == "__main__":
    sys.exit(run_submitted())
