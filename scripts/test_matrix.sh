#!/usr/bin/env bash
# The HuggingFace suite against one wheel file on several versions: scripts/test_matrix.sh [-w WHEEL] [ROW...]
#
#   -w WHEEL  the wheel; built from this checkout if not given
#   ROW       rows to run again; those that have not passed with this wheel, if not given
#
# Each row gets an environment of its own below build/matrix, which goes when the row is done: torch with CUDA takes
# 5.5 GB there. Results stay, so that what was stopped can go on; remove build/matrix to begin anew. Nothing outside this
# checkout is changed, but for pip's cache. The table is printed and put into docs/versions.md.
#
# Environment:
#   SWARM_KV_JOBS  processes that the tests run in (default: 2)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 # spinning threads slow each other down on few cores

rows=( # name | Python | what pip installs
  "newest|3.11|torch transformers"
  "transformers-5.5|3.11|torch==2.13.0 transformers==5.5.*"
  "torch-2.11|3.12|torch==2.11.0 transformers"
  "python-3.13|3.13|torch transformers"
  "python-3.10|3.10|torch==2.11.0 transformers==5.5.*"
)
matrix=build/matrix
page=docs/versions.md

find_python() { # print a Python of version $1: from PATH, or one that pyenv or uv keeps
  local candidate
  for candidate in "python$1" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python \
    "$HOME/.local/share/uv/python/cpython-$1".*/bin/python; do
    "$candidate" - "$1" 2>/dev/null <<'PYTHON' && return
import ensurepip, sys, venv

if "%d.%d" % sys.version_info[:2] != sys.argv[1]:
    sys.exit(1)
print(sys.executable)
PYTHON
  done
  return 1
}

closing_line() { # what pytest says at the end of log $1, without its decoration
  sed -nE 's/^=* ?([0-9]+ (passed|failed|error|skipped|deselected).* in [0-9.]+s).*$/\1/p' "$1" | tail -n 1
}

run_row() { # name, Python, requirements: leaves the row of the table in a file
  local name=$1 version=$2 folder=$matrix/$1 log=$matrix/$1.log python outcome
  local -a found
  if ! python=$(find_python "$version"); then
    printf '[matrix] %s: no Python %s on this machine\n' "$name" "$version"
    echo "| $name | $version | – | – | not run: no Python $version on this machine |" >"$matrix/$name.row"
    return
  fi
  printf '[matrix] %s: %s, %s\n' "$name" "$python" "$3"
  if bash scripts/test_wheel.sh "$folder" "$python" "$wheel" "$3" -q -n "${SWARM_KV_JOBS:-2}" >"$log" 2>&1; then
    outcome=$(closing_line "$log")
  else
    outcome="FAILED: $(closing_line "$log")"
    printf '[matrix] %s failed; the end of %s:\n' "$name" "$log" >&2
    tail -n 20 "$log" >&2
  fi
  read -ra found <<<"$(cat "$folder/versions" 2>/dev/null)"
  echo "| $name | ${found[0]:-$version} | ${found[1]:-–} | ${found[2]:-–} | $outcome |" >"$matrix/$name.row"
  rm -rf "$folder"
}

passed() { # has row $1 passed with this wheel?
  [[ -f $matrix/$1.row ]] && ! grep -qE 'FAILED|not run' "$matrix/$1.row"
}

table() {
  local row
  echo "\`$(basename "$wheel")\` (SHA-256 ${digest:0:12}…), $(. /etc/os-release && echo "$PRETTY_NAME")," \
    "$(uname -m), $(date +'%B %Y'):"
  echo
  echo "| | Python | torch | transformers | HuggingFace suite |"
  echo "|---|---|---|---|---|"
  for row in "${rows[@]}"; do
    cat "$matrix/${row%%|*}.row" 2>/dev/null || echo "| ${row%%|*} | | | | not run yet |"
  done
}

mkdir -p "$matrix/wheel"
if [[ ${1:-} == -w ]]; then
  wheel=$(realpath "$2")
  shift 2
else
  wheel=$(find "$PWD/$matrix/wheel" -name '*.whl')
  if [[ -z $wheel ]]; then wheel=$(bash scripts/build_wheel.sh "$matrix/wheel"); fi
fi
digest=$(sha256sum "$wheel" | cut -d' ' -f1)
if [[ $(cat "$matrix/digest" 2>/dev/null) != "$digest" ]]; then
  rm -f "$matrix"/*.row
  echo "$digest" >"$matrix/digest"
fi

for row in "${rows[@]}"; do
  IFS='|' read -r name version requirements <<<"$row"
  if (($#)); then
    [[ " $* " == *" $name "* ]] || continue
  elif passed "$name"; then
    continue
  fi
  run_row "$name" "$version" "$requirements"
done

table | tee "$matrix/table.md"
{
  sed '/^<!-- matrix -->$/q' "$page"
  echo
  cat "$matrix/table.md"
  echo
  sed -n '/^<!-- end of matrix -->$/,$p' "$page"
} >"$matrix/page.md"
cp "$matrix/page.md" "$page"
! grep -qs 'FAILED' "$matrix"/*.row
