#!/usr/bin/env bash
# Builds the wheel of this checkout with the torch of .venv and prints its path: scripts/build_wheel.sh [FOLDER]
#
#   FOLDER  where to put it (default: build/wheel); a wheel that lies there goes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/wheel}

# What an earlier build left would go into the wheel, also after it was removed from the package. Objects stay.
rm -rf build/lib* build/bdist*
rm -f "$folder"/*.whl
.venv/bin/python -m pip --disable-pip-version-check --quiet wheel --no-build-isolation --no-deps \
  --wheel-dir "$folder" . >&2
realpath "$folder"/*.whl
