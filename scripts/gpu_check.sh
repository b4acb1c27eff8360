#!/usr/bin/env bash
# Tests and measures an installed wheel on a machine with a GPU, in at most 8 minutes:
#   scripts/gpu_check.sh WHEEL [PYTHON [RESULT]] [options of `python -m benchmarks gpu_check`]
#
#   WHEEL   as scripts/build_wheel.sh makes it, with the CUDA library; nothing is built here and nothing is downloaded
#   PYTHON  has what the wheel, the tests and the benchmarks need, torch's CUDA build first (default: python3)
#   RESULT  file to write; a picture goes beside it (default: benchmarks/results/gpu_check.json)
#
# Exit status: 0 it ran, whether or not its goals hold; 1 it could not run; 2 wrong arguments; 3 no GPU is here.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { # status, message
  printf '[gpu_check] %s\n' "$2" >&2
  exit "$1"
}

if (($# < 1)) || [[ $1 == -* ]]; then
  sed -n '2,9s/^# \?//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
[[ -f $1 ]] || fail 2 "there is no wheel $1"
wheel=$(realpath "$1")
python=${2:-python3}
result=$(realpath -m "${3:-$root/benchmarks/results/gpu_check.json}")
shift $(($# < 3 ? $# : 3))
cd "$root"

found=0
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)' || found=$?
((found != 3)) || fail 3 "no GPU is here: torch of $python finds no CUDA device"
((found == 0)) || fail 1 "torch of $python cannot be imported"
missing=$("$python" -c '
import importlib.util
names = "transformers numpy faiss safetensors tqdm pytest pytest_timeout hypothesis jsonschema rich matplotlib".split()
print(*(name for name in names if importlib.util.find_spec(name) is None))')
[[ -z $missing ]] || fail 1 "$python lacks $missing"

# An environment that has the wheel, and all else from PYTHON, which is not changed.
folder=build/gpu
rm -rf "$folder"
mkdir -p "$folder/suite"
"$python" -m venv --without-pip "$folder/env"
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
site=$("$folder/env/bin/python" -c "$purelib")
"$python" -c "$purelib" >"$site/shared.pth"
"$python" -m zipfile -e "$wheel" "$site" # a wheel of libraries and modules: to unpack it is to install it

# The tests and benchmarks without this checkout's package, which would be imported instead of the wheel's.
cp -r tests benchmarks pyproject.toml "$folder/suite"
commit=$(git rev-parse HEAD 2>/dev/null || echo "not known")
cd "$folder/suite"
"$root/$folder/env/bin/python" -c '
import pathlib, sys, swarm_kv
found = pathlib.Path(swarm_kv.__file__)
sys.exit(0 if found.is_relative_to(sys.prefix) else f"{found} was imported, not the wheel")'

mkdir -p "$(dirname "$result")"
printf '[gpu_check] %s, commit %s\n' "$(basename "$wheel")" "$commit"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
exec "$root/$folder/env/bin/python" -m benchmarks gpu_check --json "$result" --plot "${result%.json}.svg" "$@"
