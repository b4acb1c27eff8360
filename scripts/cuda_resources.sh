#!/usr/bin/env bash
# Compiles the CUDA kernels for every architecture of the wheel, as far as machine code, and prints what each of them
# takes of a multiprocessor: scripts/cuda_resources.sh [FILE.cu...]. Fails where attention spills registers to memory.
# Needs nvcc, no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

architectures=(80 90 100) # setup.py's
folder=build/cuda_resources
mkdir -p "$folder"

targets=()
for architecture in "${architectures[@]}"; do
  targets+=(-gencode "arch=compute_$architecture,code=sm_$architecture")
done
targets+=(-gencode "arch=compute_$architecture,code=compute_$architecture") # newer GPUs compile it themselves

files=("$@")
((${#files[@]})) || files=(csrc/ops/cuda/*.cu)
for file in "${files[@]}"; do
  log=$folder/$(basename "$file").log
  nvcc -std=c++20 -O3 -I csrc "${targets[@]}" -Xptxas -v -c "$file" -o "$folder/$(basename "$file").o" >"$log" 2>&1 || {
    cat "$log" >&2
    exit 1
  }
done

printf '%-7s %9s %9s %7s  %s\n' target registers shared spilled kernel
for file in "${files[@]}"; do
  c++filt <"$folder/$(basename "$file").log" | awk '
    /Compiling entry function/ { split($0, part, "\047"); target = part[4] }
    /Function properties for/ {
      kernel = $0
      sub(/.*Function properties for (void )?/, "", kernel)
      sub(/\([^()]*\)$/, "", kernel)
      gsub(/swarm_kv::cuda::|\(anonymous namespace\)::/, "", kernel)
    }
    /bytes stack frame/ { spilled = $5 + $9 }
    /Used [0-9]+ registers/ {
      registers = $0; sub(/.*Used /, "", registers); sub(/ .*/, "", registers)
      shared = 0
      if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH) + 0
      if (kernel !~ /EmptyKernel/) printf "%-7s %9d %9d %7d  %s\n", target, registers, shared, spilled, kernel
      if (spilled > 0 && kernel ~ /^attend/) bad = 1
    }
    END { exit bad }' || { echo "attention spills registers" >&2 && exit 1; }
done
