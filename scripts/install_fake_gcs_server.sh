#!/bin/sh
# Install fake-gcs-server, the Google Cloud Storage server of the storage tests, into .cache/bin of this checkout. Does nothing when
# it is there. scripts/install_go.sh finds or installs the Go it needs.
set -eu

exec "$(dirname "$0")/build_go_module.sh" fake-gcs-server github.com/fsouza/fake-gcs-server v1.56.1 h1:K03sAvbLvDz4hAynpCCUqnNRp+ik9JFSvHbkD/wTPOU= .
