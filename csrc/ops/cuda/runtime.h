// The CUDA runtime for what runs on the host, or, in tests, its emulation.
#pragma once

#if defined(SWARM_KV_EMULATION)
#include "ops/cuda/emulation/runtime.h"
#else
#include <cuda_runtime_api.h>
#endif
