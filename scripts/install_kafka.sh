#!/bin/sh
# Install Apache Kafka, the broker of the Kafka tests, into .cache/kafka of this checkout, and print the path of its folder with jars.
# Does nothing when it is there. Needs Maven (mvn). scripts/kafka-jars.sha256 has the hash of each jar.
set -eu

version=3.9.1
root=$(cd "$(dirname "$0")/.." && pwd)
folder="$root/.cache/kafka"

if [ "$(cat "$folder/.version" 2>/dev/null)" = "$version" ]; then
    echo "$folder"
    exit 0
fi
if ! command -v mvn >/dev/null; then
    echo "install_kafka.sh: install Maven (Debian, Ubuntu: maven), and run this again" >&2
    exit 1
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat > "$scratch/pom.xml" <<POM
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>tikv-br</groupId>
  <artifactId>kafka-for-tests</artifactId>
  <version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>$version</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
POM
rm -rf "$folder"
mvn -q -B -f "$scratch/pom.xml" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$folder" >&2 </dev/null
if ! (cd "$folder" && LC_ALL=C sha256sum ./*.jar) | diff "$root/scripts/kafka-jars.sha256" - >&2; then
    echo "install_kafka.sh: these jars are not those of scripts/kafka-jars.sha256" >&2
    exit 1
fi
echo "$version" > "$folder/.version"
echo "$folder"
