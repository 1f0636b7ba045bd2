// The split product: out[m, n] = epilogue(z, operands...), z = sum over k of
// x[m, k] weight[n, k] + bias[n], for sm_90a, fp32-accurate on the fp16 tensor cores.
//
// Each operand is split into two fp16 (split_sm90.cuh), and three products are summed:
//
//   x w ~ x_lo w_hi + x_hi w_lo + x_hi w_hi
//
// - x is split by a pre-pass, with one scale per row. The weight is streamed: it is split in
//   registers on its way to the tensor core, with one scale per row of a tile. That scale is a
//   guess: it brings the largest of the row's first 64 of k, its first stage, to [2^9, 2^10). Later
//   values may be nearly 64 times larger.
// - If one is larger still, its hi is an infinity, and no sum of that row of the tile is finite.
//   This is detected for free. After a block's other tiles the same loop recomputes such a tile
//   with the true largest values of its rows, found by a pass over them. No state is kept between
//   calls. A weight that begins with zeros costs time, not accuracy.
// - The split's error of a weight is at most 2^-22 of it or, if it is small, 2^-34 of the largest
//   of its row's first 64 (2^-39 of the row's largest in a recomputed tile): the error is normwise
//   for a row of the weight, as it is for a row of x (2^-39).
// - The tensor core truncates when it accumulates, so every 64 of k the accumulators are added to
//   sums in fp32 registers.
// - The tile is computed transposed, weight times xᵀ: the fp32 operand must be the one that wgmma
//   reads from registers, and a thread then loads only the rows of the weight whose sums it holds.
// - Either factor of a product may be `x` here, the pre-split one: the smaller one costs less
//   (`split_choice` in host/split_plan.h). If that is the caller's weight, the result is stored
//   transposed: the rows of x are adjacent in it.
// - A z that is still not finite is recomputed in plain fp32 (`repair`): products of split
//   infinities are NaN, and sums overflow if a weight is beyond about 2^100. So is a z that is too
//   small, relative to the largest values of its rows, for the split's error: large columns of x
//   meet small ones of the weight, or the other way round (`imprecise_rows`,
//   `imprecise_weights`).
//
// - An N-major weight is one whose n are adjacent in memory (in a backward pass, or written as
//   x @ w): a kernel of its own, which loads columns from shared memory and is otherwise the same.
//
// - A 16-bit x that is upcast to fp32 at the product is fp16 without a lo: two products are left,
//   x w_lo and x w_hi. It is always the pre-split operand.
//
// - Tiles are those of all planes (`Planes`): one plane per batch and chunk of k. A batch is a
//   product of its own; so is a chunk, with its own scales. If k is one chunk, the product's kernel
//   applies the epilogue; else each chunk's sums go to memory (`run_chunk`), and `sum_chunks` adds
//   them up in a fixed order and applies it. So a product with few tiles and a long k fills the
//   GPU.
//
// Blocks are persistent: 128 x 128 tiles, 3 stages of 64 k. Two producer threads of one warpgroup
// load by TMA, one the weight and one x; two consumer warpgroups have 64 rows of the weight each.
// They take turns at the tensor core: while one's products run, the other promotes and splits.
//
// Related files: the main loop in linear_split_loop_sm90.cuh. Shared with linear_split_mma.cuh: the
// pre-pass in linear_split_prepass.cuh, linear_split_tiles.cuh, linear_split_sums.cuh,
// linear_split_epilogue.cuh, linear_split_store.cuh, and linear_split_result.cuh with sum_chunks.
//
// The generated translation unit is that of pointwise.cuh with another macro; in[0] is z:
//
//   FX_FUSER_LINEAR_SPLIT(Epilogue, /*scalars*/ 1, /*Acc*/ float, /*Out*/ float, /*x*/ float,
//                         /*operands*/ float...)
//
// and, for the kernels that all epilogues share, this header alone with
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
  // Declared aligned, so that the compiler knows the low bits of descriptors.
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
      ptx::wait_for_prerequisites();  // the pre-pass: x's halves
      feed_x<X>(args, shared);
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    ptx::wait_for_prerequisites();  // the pre-pass: the scales of x's rows
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
