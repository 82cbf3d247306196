#!/usr/bin/env bash
# Make .cache/java, a JAVA_HOME whose `java` starts Spark with an archive of its classes (AppCDS), and print it: a short run then takes half of
# the processor time, most of which goes into loading classes. Does nothing when it is there. Only for tests.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$root/.cache/java
python=$root/.venv/bin/python
java=$(readlink -f "$(command -v "${JAVA_HOME:+$JAVA_HOME/bin/}java")")
jars=$("$python" -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
wanted="$java $jars $("$java" -version 2>&1 | head -n 1)"

if [ "$(cat "$folder/made-for" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/bin"
    trap 'rm -rf "$folder/work"' EXIT
    mkdir "$folder/work"
    cat > "$folder/work/job.py" <<'JOB'
import sys

from pyspark.sql import SparkSession

with SparkSession.builder.getOrCreate() as spark:
    frame = spark.range(100).repartition(2).sort("id")
    for form in ("parquet", "csv", "json"):
        frame.write.format(form).save(f"{sys.argv[1]}/{form}")
        spark.read.format(form).load(f"{sys.argv[1]}/{form}").rdd.map(len).collect()
JOB
    "${jars%/jars}/bin/spark-submit" --master 'local[1]' --conf spark.ui.enabled=false \
        --driver-java-options "-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit=$folder/spark.jsa" \
        "$folder/work/job.py" "$folder/work" >/dev/null 2>"$folder/log" </dev/null
    cat > "$folder/bin/java" <<JAVA
#!/bin/sh
# Logging is off, as another class path would be a warning on standard output.
case "\$*" in
*"$jars"*) exec "$java" -XX:SharedArchiveFile="$folder/spark.jsa" -Xlog:disable -Xlog:all=error:stderr "\$@" ;;
esac
exec "$java" "\$@"
JAVA
    chmod +x "$folder/bin/java"
    [ -s "$folder/spark.jsa" ]
    echo "$wanted" > "$folder/made-for"
fi
echo "$folder"
