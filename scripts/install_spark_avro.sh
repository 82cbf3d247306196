#!/bin/sh
# Install Spark's module for Avro, which pyspark lacks, into .cache/jars of this checkout, for the test of load raw --value-encoding avro.
# Does nothing when it is there. Needs Maven (mvn).
set -eu

# The newest one that Maven Central has; it works with later versions of Spark 4 too.
version=4.0.1
sum=834207b759159ceb7e367df9c0fe5998bbb547fdcdc5269dfeeba2c6803559b6
root=$(cd "$(dirname "$0")/.." && pwd)
jar="$root/.cache/jars/spark-avro_2.13-$version.jar"

if [ ! -e "$jar" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    mvn -q -B dependency:get -Dtransitive=false -Dartifact="org.apache.spark:spark-avro_2.13:$version" >&2
    mvn -q -B dependency:copy -Dartifact="org.apache.spark:spark-avro_2.13:$version" -DoutputDirectory="$scratch" >&2
    echo "$sum  $scratch/$(basename "$jar")" | sha256sum -c --quiet - >&2
    mkdir -p "$root/.cache/jars"
    mv "$scratch/$(basename "$jar")" "$jar"
fi
echo "$jar"
