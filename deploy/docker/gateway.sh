#!/bin/bash
# Runs the gateway of a Ray cluster in a container: `shoal join URL ...`, for the cluster at RAY_HEAD (host:port), and the
# Ray node without CPUs through which a program reaches a cluster. If one of them ends, the other is ended, and the
# container with them; whoever started it starts it again. Jobs train on meanwhile.
set -euo pipefail
: "${RAY_HEAD:?is not set. It is the host:port of the head of the Ray cluster}"

# The node gets nothing of Shoal's environment: Ray hands its own on to what it starts.
mapfile -t settings < <(compgen -e SHOAL_ || true)
env "${settings[@]/#/--unset=}" \
    ray start --address="$RAY_HEAD" --num-cpus=0 --num-gpus=0 --disable-usage-stats --block &
node=$!
gateway=
trap 'kill -TERM ${gateway:-$node} 2>/dev/null' TERM INT

# The driver attaches to the node on this machine, so it must be registered first.
until python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:52365/api/healthz', timeout=2)" 2>/dev/null; do
    kill -0 "$node" 2>/dev/null || { echo "The Ray node could not join $RAY_HEAD." >&2; exit 1; }
    sleep 0.5
done
shoal join "$@" --ray-address="$RAY_HEAD" &
gateway=$!

status=0
wait -n "$gateway" "$node" || status=$?
kill -TERM "$gateway" 2>/dev/null || true
wait "$gateway" 2>/dev/null || true
kill -TERM "$node" 2>/dev/null || true
wait "$node" 2>/dev/null || true
exit "$status"
