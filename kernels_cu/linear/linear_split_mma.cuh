// The split product of linear_split_sm90.cuh by mma.sync, for every architecture from sm_80 on: the
// same scales, the same order of k, the same layout of a warp's sums, the same epilogue.
//
// What differs is how operands come to the tensor core:
//
// - Stages of 32 of k come to shared memory by cp.async, the weight as it is and the halves of x
// that
//   the pre-pass wrote. How many there are follows from what shared memory a block may have
//   (`mma_stages`): two on GPUs with 99 KB, four on an A100, six from Hopper on.
// - Each of eight warps copies an eighth of a stage, since a ninth warp would leave them 168
//   registers instead of 255. They meet at mbarriers a stage, not at a barrier of the block: one
//   splits while another multiplies.
// - A warp multiplies 32 rows of the weight by 64 of x. 16 by 128, as the Hopper kernel's warps
// have
//   it, would read shared memory half as often again.
// - After the last stage the two warps that have the same rows of the weight swap half of their
//   sums. From there on each has 16 rows of the weight by 128 of x.
// - Sums are promoted every 32 of k, where the Hopper kernel promotes every 64: mma.sync's
//   accumulators are registers, and 32 at once leave room for the stage to come.
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
  ptx::wait_for_prerequisites();  // x as the pre-pass splits it, and the scales of its rows

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
