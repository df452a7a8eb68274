#!/bin/bash
# Runs the Ray node of a gateway: without CPUs and GPUs, so that no worker is placed on it. Jobs can start code here all the
# same, as on every node of their cluster; it finds no token of Shoal. The gateway runs in a container of its own, as a user
# of the same group, and reaches the node's sockets in the directory that both mount.
set -euo pipefail
: "${RAY_HEAD:?is not set. It is the host:port of the head of the Ray cluster}"
: "${RAY_SESSIONS:=/var/lib/ray-gateway}"
umask 0007
rm -rf "${RAY_SESSIONS:?}"/*  # sessions of nodes before this one
exec ray start --address="$RAY_HEAD" --temp-dir="$RAY_SESSIONS/tmp" --num-cpus=0 --num-gpus=0 --disable-usage-stats --block
