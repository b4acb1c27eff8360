// Scans, sorts and reductions of a block for kernel sources: CUB's, or their twins in emulation.
#pragma once

#include "ops/cuda/device.h"

#if defined(SWARM_KV_EMULATION)
#include "ops/cuda/emulation/cub.h"
#elif defined(__CUDACC__)
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#endif
