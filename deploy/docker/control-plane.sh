#!/bin/bash
# Runs a control plane in a container: `shoal serve`, which joins the Ray cluster at SHOAL_RAY_ADDRESS (host:port), and the
# Ray node without CPUs that a program needs beside it for that. If one of them ends, the other is ended, and the
# container with them; whoever started it starts it again. Jobs train on meanwhile.
set -euo pipefail
: "${SHOAL_RAY_ADDRESS:?is not set. It is the host:port of the head of the Ray cluster}"

# The node gets nothing of Shoal's environment: Ray hands its own on to what it starts.
mapfile -t settings < <(compgen -e SHOAL_ || true)
env "${settings[@]/#/--unset=}" \
    ray start --address="$SHOAL_RAY_ADDRESS" --num-cpus=0 --num-gpus=0 --disable-usage-stats --block &
node=$!
server=
trap 'kill -TERM ${server:-$node} 2>/dev/null' TERM INT

# The driver attaches to the node on this machine, so it must be registered first.
until python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:52365/api/healthz', timeout=2)" 2>/dev/null; do
    kill -0 "$node" 2>/dev/null || { echo "The Ray node could not join $SHOAL_RAY_ADDRESS." >&2; exit 1; }
    sleep 0.5
done
shoal serve "$@" &
server=$!

status=0
wait -n "$server" "$node" || status=$?
kill -TERM "$server" 2>/dev/null || true
wait "$server" 2>/dev/null || true
kill -TERM "$node" 2>/dev/null || true
wait "$node" 2>/dev/null || true
exit "$status"
