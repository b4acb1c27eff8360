#!/usr/bin/env bash
# Every check of this project, from a fresh clone on: scripts/test.sh [pytest options]
# The environment is made and checked beside the C++ tests, which need none, each on half of the cores; what it prints
# comes when it is done. Stops where a step fails; pytest comes last, so its closing line is the last line.
#
# Environment, beside that of scripts/setup.sh:
#   SWARM_KV_OLDEST  what pip installs for the run on the oldest versions, with pip options if need be
#                    (default: torch==2.13.0 transformers==5.5.*; torch is best a CPU build, which is small)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

cores=$(env -u OMP_NUM_THREADS nproc) # it would count that
export OMP_NUM_THREADS=1              # spinning threads slow each other down on few cores
jobs=$cores # that a step may use
beside=     # process of the steps that run beside these

pytest_workers() { echo $((jobs < 4 ? jobs : 4)); } # each a Python process with a model and a gigabyte or two

step() { # title, command...
  # What runs beside and has ended, or failed, is looked at here.
  if [[ -n $beside ]] && ! kill -0 "$beside" 2>/dev/null; then meet; fi
  local title=$1 start=$SECONDS
  shift
  printf '\n[test] %s\n' "$title"
  "$@" || {
    printf '[test] FAILED: %s\n' "$title" >&2
    exit 1
  }
  printf '[test] %s: %d s\n' "$title" $((SECONDS - start))
}

part() { # function: its steps run beside those that follow, until `meet`
  jobs=$(((cores + 1) / 2))
  set -m # a process group, which can be ended as a whole
  "$1" >"build/$1.log" 2>&1 &
  beside=$!
  set +m
  beside_log=build/$1.log
  trap '[[ -z $beside ]] || kill -- "-$beside" 2>/dev/null' EXIT
}

meet() {
  local status=0
  wait "$beside" || status=$?
  beside=
  jobs=$cores
  cat "$beside_log"
  ((status == 0)) || exit 1
}

cpp_format() {
  find csrc \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 .venv/bin/clang-format --dry-run -Werror
}

build_cpp() { # folder below build/, CMake options...
  local folder=build/$1
  shift
  cmake -S . -B "$folder" -G Ninja "$@" >"$folder.log" 2>&1 || { cat "$folder.log" && return 1; }
  cmake --build "$folder" -j "$jobs" >"$folder.log" 2>&1 || { tail -n 60 "$folder.log" && return 1; }
}

run_cpp() { # folder below build/
  local folder=build/$1
  # gcc's ThreadSanitizer cannot place its memory under the address randomisation of recent kernels.
  local -a fixed=()
  if setarch "$(uname -m)" -R true 2>/dev/null; then fixed=(setarch "$(uname -m)" -R); fi
  ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=second_deadlock_stack=1 \
    "${fixed[@]}" ctest --test-dir "$folder" -j "$jobs" --no-tests=error --output-on-failure --quiet \
    -O "$folder.log" || { grep -vE ' Start +[0-9]+: | Passed +[0-9.]+ sec' "$folder.log" && return 1; }
  grep 'tests passed' "$folder.log"
}

sanitize() { # sanitizers, their names in words
  local folder=san-${1//,/-}
  step "C++ build, $2" build_cpp "$folder" -DSWARM_KV_SANITIZE="$1" -DSWARM_KV_BENCH=OFF
  step "C++ tests, $2" run_cpp "$folder"
}

oldest_versions() { # a wheel built with the newest torch serves them: the stable ABI
  local wheel
  wheel=$(bash scripts/build_wheel.sh) || return
  bash scripts/test_wheel.sh .venv-oldest .venv/bin/python "$wheel" \
    "${SWARM_KV_OLDEST:-torch==2.13.0 transformers==5.5.*}" -q -n "$(pytest_workers)" --dist loadfile \
    --no-loadscope-reorder
}

python_part() {
  step "set-up" env MAX_JOBS="${MAX_JOBS:-$jobs}" bash scripts/setup.sh test
  step "C++ format" cpp_format
  step "Python lint" .venv/bin/ruff check .
  step "Python format" .venv/bin/ruff format --check .
  step "types" .venv/bin/mypy
  if command -v nvcc >/dev/null; then
    step "CUDA attention: registers, no spills" bash scripts/cuda_resources.sh csrc/ops/cuda/attention.cu
  fi
  step "HuggingFace suite, installed wheel, oldest versions" oldest_versions
}

mkdir -p build
step "system packages" bash scripts/setup.sh test system
part python_part
sanitize address,undefined "address and undefined-behaviour sanitizers"
sanitize thread "thread sanitizer"
step "C++ build, benchmarks" build_cpp bench -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS= -DSWARM_KV_TESTS=OFF
if [[ -n $beside ]]; then meet; fi
step "instructions of hot paths" .venv/bin/python -m benchmarks.instructions

printf '\n[test] Python tests (%d s so far)\n' "$SECONDS"
# Files stay whole for the fixtures that their tests share, and in order, since the first folder takes longest.
exec .venv/bin/python -m pytest -n "$(pytest_workers)" --dist loadfile --no-loadscope-reorder "$@"
