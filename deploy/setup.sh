#!/bin/sh
# Builds the virtual environment and prints each step. Called by `make setup`; needs only Python 3.11+ with venv.
set -eu
say() { printf '\033[36m==>\033[0m %s\n' "$*"; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Shoal needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
bar="--progress-bar on"; [ -t 1 ] || bar="--progress-bar off -q"

# torch first: without a GPU its CPU build suffices, which is several gigabytes smaller.
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        say "installing torch (GPU build)"
        pip install $bar -c constraints.txt 'torch==2.13.*'
    else
        say "installing torch (no GPU found)"
        [ -n "${TORCH_CPU_INDEX:-}" ] || say "TORCH_CPU_INDEX, an index with CPU builds, is not set: it may be the standard build"
        pip install $bar -c constraints.txt ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} 'torch==2.13.*'
    fi
fi
say "installing Shoal and its dependencies (a minute or two)"
pip install $bar -c constraints.txt -e '.[dev,postgres,s3,hf]'
say "ready: $VENV/bin/shoal"
