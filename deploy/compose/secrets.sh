#!/bin/sh
# Writes random secrets for compose.yaml into the folder `secrets` beside this file, once: what is there is kept.
# The containers run as other users than the one who owns these files, so the folder is closed and the files are not.
set -eu
folder=$(dirname "$0")/secrets
mkdir -p "$folder"
chmod 0700 "$folder"
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
keep() { [ -s "$folder/$1" ] || printf '%s' "$2" > "$folder/$1"; chmod 0444 "$folder/$1"; }

keep postgres_password "$(random)"
keep shoal_database_url "postgresql://shoal:$(cat "$folder/postgres_password")@postgres/shoal"
keep ray_auth_token "$(random)"
# The control plane accepts it from its gateway: the form of Shoal's tokens, with 256 bits.
keep cluster_token "shoal_$(random | head -c 8)_$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')"
keep grafana_admin_password "$(random)"
# Replaced by a token of the server once that runs (docs/install.md); Prometheus reads the file at each scrape.
keep prometheus_token none-yet
chmod 0644 "$folder/prometheus_token"
echo "The secrets are in $folder. Grafana's user is admin."
