// out[m, n] = epilogue(z, operands...), z = sum over k of x[m, k] weight[n, k] + bias[n], for
// sm_90a: fp32-accurate on the fp16 tensor cores.
//
// Each operand is two fp16 (split_sm90.cuh), and three products are summed:
//
//   x w ~ x_lo w_hi + x_hi w_lo + x_hi w_hi
//
// - x is split by a pre-pass, with one scale a row. The weight is split in registers on its way to
//   the tensor core, with one scale for each row of a tile, which is a guess: it brings the largest
//   of the row's first 64 of k, its first stage, to [2^9, 2^10). Later values
//   may be nearly 64 times larger.
// - Where one is larger still, its hi is an infinity, and no sum of that row of the tile is finite.
//   That is seen for free; after a block's other tiles such a tile is done again by the same loop,
//   with the true largest of its rows, found by a pass over them. There is no state between calls
//   that could be stale. A weight that begins with zeros costs time, not accuracy.
// - What the split loses of a weight is at most 2^-22 of it or, where it is small, 2^-34 of the
//   largest of its row's first 64 (2^-39 of the row's largest in a tile done again): the error is
//   normwise for a row of the weight, as it is for a row of x (2^-39).
// - The tensor core truncates when it accumulates: every 64 of k the accumulators are added to sums
//   in fp32 registers.
// - The tile is computed transposed, weight times xᵀ: the fp32 operand must be the one that wgmma
//   takes from registers, and a thread then reads just the rows of the weight whose sums it holds.
// - Either factor of a product may be `x` here, the one that is split ahead of the others: the
//   smaller one costs less (`split_choice` in host/split_plan.h). Where that is the caller's
//   weight, the result is stored transposed: the rows of x are adjacent in it.
// - A z that is not finite even then is computed by plain fp32 arithmetic (`repair`): products of
//   split infinities are NaN, and sums overflow where a weight is beyond about 2^100. So are z that
//   are too small beside their rows' largest for what the split loses there: large columns of x
//   meet small ones of the weight, or the other way round (`imprecise_rows`,
//   `imprecise_weights`).
//
// - An N-major weight is one whose n are adjacent in memory (in a backward pass, or written as
//   x @ w): a kernel of its own, which loads columns from shared memory and is else the same.
//
// - An x of 16 bits, cast up to fp32 where the product is written, is fp16 without a lo: two
//   products are left, x w_lo and x w_hi. It is always the one that is split first.
//
// - Tiles are those of all planes (`Planes`): one for each batch and chunk of k. A batch is a
//   product by itself; so is a chunk, with scales of its own. Where k is in one chunk the product's
//   kernel applies the epilogue; else each chunk's sums go to memory (`run_chunk`), and
//   `sum_chunks` adds them up in a fixed order and applies it. So few tiles with a long k fill the
//   GPU.
//
// Blocks are persistent: one warpgroup feeds shared memory, two of 64 rows of the weight each
// compute. They take turns at the tensor core: while one's products run the other promotes and
// splits.
//
// Beside this file: the main loop in linear_split_loop_sm90.cuh. What it shares with the one of
// linear_split_mma.cuh: the pre-pass in linear_split_prepass.cuh, linear_split_tiles.cuh,
// linear_split_sums.cuh, linear_split_epilogue.cuh, linear_split_store.cuh, and what the sums
// become, and sum_chunks, in linear_split_result.cuh.
//
// The generated translation unit is that of pointwise.cuh with another last line, where in[0] is z:
//
//   FX_FUSER_LINEAR_SPLIT(Epilogue, /*scalars*/ 1, /*Acc*/ float, /*Out*/ float, /*x*/ float,
//                         /*operands*/ float...)
//
// and, for the kernels that all epilogues have, this header alone with
//
//   FX_FUSER_LINEAR_SPLIT_COMMON(/*x*/ float)
#pragma once

#include "linear/linear_split_kernels.cuh"
#include "linear/linear_split_loop_sm90.cuh"

namespace fx_fuser::linear_split {

struct Hopper {
  static constexpr int kWordsAhead = 20;  // see Store

  template <bool kNMajor, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
  static __device__ __forceinline__ void run(const LinearSplitArgs& args);
};

template <bool kNMajor, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
__device__ __forceinline__ void Hopper::run(const LinearSplitArgs& args) {
  static_assert(std::is_same_v<Acc, float> && (std::is_same_v<X, float> || kIs16BitFloat<X>));
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  HopperShared& shared = *reinterpret_cast<HopperShared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (Barriers<kLinearStages>* barriers : {&shared.of_weight, &shared.of_x}) {
      for (int slot = 0; slot < kLinearStages; ++slot) {
        ptx::mbarrier_init(ptx::shared_address(&barriers->full[slot]), 1);
        ptx::mbarrier_init(ptx::shared_address(&barriers->empty[slot]),
                           kConsumers * kWarpgroup / 32);
      }
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.tiles.ordinary_tiles_done),
                       kConsumers * kWarpgroup / 32);
    shared.tiles.any_redo = 0;
    shared.tiles.began = clock64();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    const int producer = threadIdx.x % kWarpgroup;
    if (producer == 0) {
      feed_weight<kNMajor>(args, shared);
    } else if (producer == 32) {
      ptx::wait_for_prerequisites();  // x as the pre-pass splits it
      feed_x<X>(args, shared);
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    ptx::wait_for_prerequisites();  // the scales of x's rows
    TileEpilogue<Hopper, X, Epilogue, kScalars, Out, In...> tile_epilogue{{args, shared.tiles}};
    consume<kNMajor, X>(args, shared, warpgroup, tile_epilogue);
  }
}

}  // namespace fx_fuser::linear_split

// FX_FUSER_LINEAR_SPLIT(Epilogue, scalars, Acc, Out, X, Operands...)
#define FX_FUSER_LINEAR_SPLIT(...)                                                        \
  FX_FUSER_LINEAR_SPLIT_KERNELS(fx_fuser::linear_split::Hopper, fx_fuser::kLinearThreads, \
                                __VA_ARGS__)

// FX_FUSER_LINEAR_SPLIT_COMMON(X)
#define FX_FUSER_LINEAR_SPLIT_COMMON(X) \
  FX_FUSER_LINEAR_SPLIT_COMMON_KERNELS(fx_fuser::linear_split::Hopper, fx_fuser::kLinearThreads, X)
