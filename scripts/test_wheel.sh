#!/usr/bin/env bash
# Runs the HuggingFace suite against an installed wheel:
#   scripts/test_wheel.sh FOLDER PYTHON WHEEL REQUIREMENTS [pytest options]
#
#   FOLDER        environment to install into; made anew when PYTHON is another one than last time
#   PYTHON        Python to make it with
#   WHEEL         as scripts/build_wheel.sh makes it
#   REQUIREMENTS  what pip installs beside it, with pip options if need be: "torch==2.13.0 transformers==5.5.*"
#
# The tests and what they read are copied into FOLDER, so that they import the wheel's package and not this checkout's.
# FOLDER/versions names the versions in use: those of Python, torch and transformers.
set -euo pipefail
if (($# < 4)); then
  sed -n '2,9s/^# \?//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
mkdir -p "$1"
folder=$(realpath "$1")
base=$2
wheel=$(realpath "$3")
read -ra requirements <<<"$4"
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")/.."

identity=$("$base" -c 'import sys; print(sys.base_prefix, sys.version)')
if [[ $(cat "$folder/.python" 2>/dev/null) != "$identity" ]]; then
  "$base" -m venv --clear "$folder"
  "$folder/bin/python" -m pip --disable-pip-version-check --quiet install --upgrade pip
  echo "$identity" >"$folder/.python"
fi
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" "${requirements[@]}" "swarm-kv[test] @ file://$wheel"
"${pip[@]}" --force-reinstall --no-deps "$wheel" # an earlier wheel of the same version would have stayed

rm -rf "$folder/suite"
mkdir "$folder/suite"
cp -r tests examples docs pyproject.toml "$folder/suite"
cd "$folder/suite"
"$folder/bin/python" - >"$folder/versions" <<'PYTHON'
import pathlib
import platform
import sys

import torch
import transformers

import swarm_kv

found = pathlib.Path(swarm_kv.__file__)
if not found.is_relative_to(sys.prefix):
    sys.exit(f"{found} was imported, not the installed wheel's package")
print(platform.python_version(), torch.__version__, transformers.__version__)
PYTHON
echo "$(basename "$wheel"), with Python, torch, transformers $(cat "$folder/versions")"
exec "$folder/bin/python" -m pytest tests/hf -m "not slow" "$@"
