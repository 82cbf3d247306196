#!/bin/sh
# Build JuiceFS, whose metadata tests keep in the playground, into .cache/bin of this checkout: with TiKV and local folders only, which
# takes about two minutes of two cores. Does nothing when it is there. scripts/install_go.sh finds or installs the Go it needs; it needs gcc, too.
set -eu

without=nogateway,nowebdav,nocos,nobos,nohdfs,noibmcos,noobs,nooss,noqingstor,nosftp,noswift,noazure,nogs,noufile,nob2,nonfs,nodragonfly,nocifs,nostorj,noqiniu,notos,noks3
without=$without,noredis,nosqlite,nomysql,nopg,nobadger,noetcd
exec "$(dirname "$0")/build_go_module.sh" juicefs github.com/juicedata/juicefs v1.4.1 h1:sz7DmNvKRjJRnlTeRd2EAqgrSSEz5u5G39WPJZA4xKw= . -tags "$without" -ldflags '-s -w'
