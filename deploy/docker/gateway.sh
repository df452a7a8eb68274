#!/bin/bash
# Runs the gateway of a Ray cluster in a container: `shoal join URL ...`, for the cluster at RAY_HEAD (host:port). A program
# reaches a cluster through a Ray node, and each node runs whatever jobs start there; so that node is in a container of its
# own, as another user (gateway-node.sh). The two share the network, the numbers of processes, by which Ray's client finds
# its node, and the directory of the node's sockets.
#
# If the node does not answer for a minute, this ends, and whoever started it starts it again: a container that shares the
# network of another one loses it when that one is started anew. Jobs train on meanwhile.
set -euo pipefail
: "${RAY_HEAD:?is not set. It is the host:port of the head of the Ray cluster}"
umask 0007

answers() { python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:52365/api/healthz', timeout=2)" 2>/dev/null; }
until answers; do sleep 0.5; done
shoal join "$@" --ray-address="$RAY_HEAD" &
gateway=$!
trap 'kill -TERM "$gateway" 2>/dev/null' TERM INT

silent=0
while kill -0 "$gateway" 2>/dev/null; do
    sleep "${CHECK_S:-5}" &
    wait -n "$gateway" "$!" 2>/dev/null || true
    if answers; then silent=0; else silent=$((silent + 1)); fi
    if [ "$silent" -ge 12 ]; then
        echo "The Ray node beside this gateway does not answer: ending." >&2
        kill -TERM "$gateway" 2>/dev/null || true
        break
    fi
done
status=0
wait "$gateway" || status=$?
exit "$status"
