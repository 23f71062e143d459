#!/usr/bin/env bash
# Sets everything up in a virtual environment, builds, and serves SmolLM2-135M-Instruct with an FP4
# KV cache at http://127.0.0.1:23333. Further arguments go to `lmdeploy serve api_server`:
#
#   scripts/serve.sh --server-port 8000 --session-len 4096
#
# A later --quant-policy wins over the default 16, and --kv-cache-format replaces it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${LMDEPLOY_VENV:-$PWD/.venv}"
scripts/setup.sh serve

cache=(--quant-policy 16)
[[ " $* " != *" --kv-cache-format"* ]] || cache=()
exec "$venv/bin/lmdeploy" serve api_server smollm2 "${cache[@]}" "$@"
