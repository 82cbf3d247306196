#!/bin/sh
# Install versitygw, the real S3 server of the storage tests, into .cache/bin of this checkout. Does nothing when it is there.
# scripts/install_go.sh finds or installs the Go it needs.
set -eu

exec "$(dirname "$0")/build_go_module.sh" versitygw github.com/versity/versitygw v1.8.0 h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc= ./cmd/versitygw
