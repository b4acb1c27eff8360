#!/usr/bin/env bash
# Sets up this checkout where that is needed, then shows swarm_kv at work: scripts/demo.sh [options of swarm-kv demo]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh" demo
exec "$root/.venv/bin/swarm-kv" demo "$@"
