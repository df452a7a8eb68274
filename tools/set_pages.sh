#!/bin/sh
# Checks that the scripts of the pages are set as prettier sets them: tools/set_pages.sh [--write]. With --write it sets them.
# Prettier is an npm package; it is installed below .venv once. Without npm the check is left out, and this says so.
set -eu
cd "$(dirname "$0")/.."
version=3.10.1
program=.venv/node_modules/.bin/prettier
if [ "$("$program" --version 2>/dev/null)" != "$version" ]; then
    if ! command -v npm >/dev/null; then
        echo "npm is not installed: the check of the pages' scripts by prettier was left out."
        exit 0
    fi
    npm install --prefix .venv --no-save --no-audit --no-fund --silent "prettier@$version"
fi
exec "$program" --print-width 120 --log-level warn "${1:---check}" api/shoal_api/http/static/*.js
