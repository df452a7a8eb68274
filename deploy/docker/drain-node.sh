#!/bin/bash
# Drains the Ray node of this container and returns when it has ended: the preStop hook of a worker's pod. The node
# itself gives notice to Ray, which Shoal follows (docs/ray-cluster.md, "Draining a node"), so the pod needs no token of
# Shoal. The jobs leave at a step boundary; RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S limits the time.
set -euo pipefail
for process in /proc/[0-9]*; do
    command=$(tr '\0' ' ' 2>/dev/null < "$process/cmdline") || continue
    if [[ "$command" =~ ^[^\ ]*python[^\ ]*\ [^\ ]*/ray\ start\ .*--block ]]; then
        pid=${process#/proc/}
        kill -TERM "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.5; done
        exit 0
    fi
done
echo "No process of \`ray start --block\` runs here." >&2
