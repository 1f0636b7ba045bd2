// The split product with the architecture's main loop: wgmma on Hopper, else mma.sync. The shim
// makes the same choice when it launches them (host/linear_split.h).
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "linear/linear_split_sm90.cuh"
#else
#include "linear/linear_split_mma.cuh"
#define FX_FUSER_LINEAR_SPLIT(...) FX_FUSER_LINEAR_SPLIT_MMA(__VA_ARGS__)
#define FX_FUSER_LINEAR_SPLIT_COMMON(X) FX_FUSER_LINEAR_SPLIT_MMA_COMMON(X)
#endif
