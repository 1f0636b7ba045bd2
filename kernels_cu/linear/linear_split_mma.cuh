// The split product of linear_split_sm90.cuh by mma.sync, for every architecture from sm_80 on:
// same scales, same order of k, same layout of a warp's sums, same epilogue.
//
// It differs in how operands reach the tensor core:
//
// - Stages of 32 of k are loaded by cp.async: the weight in fp32, and the halves of x that the
//   pre-pass wrote. Their number depends on a block's shared memory (`mma_stages`): two on GPUs
//   with 99 KB, four on an A100, six from Hopper on.
// - Each of eight warps copies an eighth of a stage; a ninth warp as producer would leave them 168
//   registers instead of 255. They synchronise by mbarriers per stage, not by a barrier of the
//   block, so that one splits while another multiplies.
// - A warp multiplies 32 rows of the weight by 64 of x. 16 by 128, as in the Hopper kernel, would
//   read half as much again from shared memory.
// - After the last stage the two warps that have the same rows of the weight swap half of their
//   sums. From then on each has 16 rows of the weight by 128 of x.
// - Sums are promoted every 32 of k instead of the Hopper kernel's 64: mma.sync's accumulators are
//   registers, and 32 at once leave room for the next stage.
//
// The generated translation units are those of linear_split_sm90.cuh with FX_FUSER_LINEAR_SPLIT_MMA
// and FX_FUSER_LINEAR_SPLIT_MMA_COMMON.
#pragma once

#include "linear/linear_split_kernels.cuh"
#include "linear/linear_split_mma_loop.cuh"

namespace fx_fuser::linear_split {

struct Mma {
  static constexpr int kWordsAhead = 12;  // see Store

  template <bool kNMajor, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
  static __device__ __forceinline__ void run(const LinearSplitArgs& args);
};

template <bool kNMajor, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
__device__ __forceinline__ void Mma::run(const LinearSplitArgs& args) {
  static_assert(std::is_same_v<Acc, float> && (std::is_same_v<X, float> || kIs16BitFloat<X>));
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  MmaShared& shared = *reinterpret_cast<MmaShared*>(dynamic_shared);

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < args.stages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.ring.full[slot]), kMmaThreads);
      ptx::mbarrier_init(ptx::shared_address(&shared.ring.empty[slot]),
                         kLinearConsumerThreads / 32);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.tiles.ordinary_tiles_done),
                       kLinearConsumerThreads / 32);
    shared.tiles.any_redo = 0;
    shared.tiles.began = clock64();
  }
  __syncthreads();
  ptx::wait_for_prerequisites();  // the pre-pass: x's halves, and the scales of its rows

  TileEpilogue<Mma, X, Epilogue, kScalars, Out, In...> tile_epilogue{{args, shared.tiles}};
  multiply<kNMajor, X>(args, shared, tile_epilogue);
}

}  // namespace fx_fuser::linear_split

// FX_FUSER_LINEAR_SPLIT_MMA(Epilogue, scalars, Acc, Out, X, Operands...)
#define FX_FUSER_LINEAR_SPLIT_MMA(...) \
  FX_FUSER_LINEAR_SPLIT_KERNELS(fx_fuser::linear_split::Mma, fx_fuser::kMmaThreads, __VA_ARGS__)

// FX_FUSER_LINEAR_SPLIT_MMA_COMMON(X)
#define FX_FUSER_LINEAR_SPLIT_MMA_COMMON(X) \
  FX_FUSER_LINEAR_SPLIT_COMMON_KERNELS(fx_fuser::linear_split::Mma, fx_fuser::kMmaThreads, X)
