#!/usr/bin/env bash
# Every check of this project, from a fresh clone on: scripts/test.sh [pytest options]
# Stops at the first step that fails; pytest comes last, so its closing line is the last line.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

export OMP_NUM_THREADS=1 # spinning threads slow each other down on few cores
jobs=$(nproc)

step() { # title, command...
  local title=$1 start=$SECONDS
  shift
  printf '\n[test] %s\n' "$title"
  "$@" || {
    printf '[test] FAILED: %s\n' "$title" >&2
    exit 1
  }
  printf '[test] %s: %d s\n' "$title" $((SECONDS - start))
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
    "${fixed[@]}" ctest --test-dir "$folder" -j "$jobs" --timeout 120 --no-tests=error --output-on-failure --quiet \
    -O "$folder.log" || { grep -vE ' Start +[0-9]+: | Passed +[0-9.]+ sec' "$folder.log" && return 1; }
  grep 'tests passed' "$folder.log"
}

sanitize() { # sanitizers, their names in words
  local folder=san-${1//,/-}
  step "C++ build, $2" build_cpp "$folder" -DSWARM_KV_SANITIZE="$1" -DSWARM_KV_BENCH=OFF
  step "C++ tests, $2" run_cpp "$folder"
}

step "set-up" bash scripts/setup.sh test
mkdir -p build
step "C++ format" cpp_format
step "Python lint" .venv/bin/ruff check .
step "Python format" .venv/bin/ruff format --check .
step "types" .venv/bin/mypy
sanitize address,undefined "address and undefined-behaviour sanitizers"
sanitize thread "thread sanitizer"
step "C++ build, benchmarks" build_cpp bench -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS= -DSWARM_KV_TESTS=OFF
step "instructions of hot paths" .venv/bin/python -m benchmarks.instructions

printf '\n[test] Python tests (%d s so far)\n' "$SECONDS"
# A process per core, each with a model and a gigabyte or two; files stay whole for the fixtures that their tests share,
# and in order, since the first folder takes longest.
exec .venv/bin/python -m pytest -n $((jobs < 4 ? jobs : 4)) --dist loadfile --no-loadscope-reorder "$@"
