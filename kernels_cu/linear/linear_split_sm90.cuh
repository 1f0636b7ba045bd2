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
// Beside this file: the pre-pass in linear_split_prepass_sm90.cuh, linear_split_tiles_sm90.cuh, the
// main loop in linear_split_loop_sm90.cuh, linear_split_epilogue_sm90.cuh and
// linear_split_store_sm90.cuh. What the sums become, and sum_chunks: linear_split_result.cuh.
//
// The generated translation unit is that of pointwise.cuh with another last line, where in[0] is z:
//
//   FX_FUSER_LINEAR_SPLIT(Epilogue, /*scalars*/ 1, /*Acc*/ float, /*Out*/ float, /*x*/ float,
//                         /*operands*/ float...)
#pragma once

#include "common/copy_rows.cuh"
#include "linear/linear_split_epilogue_sm90.cuh"
#include "linear/linear_split_loop_sm90.cuh"
#include "linear/linear_split_prepass_sm90.cuh"

namespace fx_fuser::linear_split {

template <bool kNMajor, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
__device__ __forceinline__ void run(const LinearSplitArgs& args) {
  static_assert(std::is_same_v<Acc, float> && (std::is_same_v<X, float> || kIs16BitFloat<X>));
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (Barriers* barriers : {&shared.of_weight, &shared.of_x}) {
      for (int slot = 0; slot < kLinearStages; ++slot) {
        ptx::mbarrier_init(ptx::shared_address(&barriers->full[slot]), 1);
        ptx::mbarrier_init(ptx::shared_address(&barriers->empty[slot]),
                           kConsumers * kWarpgroup / 32);
      }
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.ordinary_tiles_done),
                       kConsumers * kWarpgroup / 32);
    shared.any_again = 0;
    shared.began = clock64();
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
    TileEpilogue<X, Epilogue, kScalars, Out, In...> tile_epilogue{{args, shared}};
    consume<kNMajor, X>(args, shared, warpgroup, tile_epilogue);
  }
}

// The kernels around it, of the macro's arguments.
template <class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
struct Around {
  template <bool kNMajor>
  static __device__ __forceinline__ void run_chunk(const LinearSplitArgs& args) {
    ptx::launch_dependents();
    run<kNMajor, Partial, 0, float, float, X>(args);
  }
  static __device__ __forceinline__ void run_sum(const LinearSumArgs& args) {
    sum_chunks<Epilogue, kScalars, Out, In...>(args);
  }
  static __device__ __forceinline__ void split_rows(const SplitArgs& args) {
    fx_fuser::split_rows<X>(args);
  }
  static __device__ __forceinline__ void split_columns(const SplitArgs& args) {
    fx_fuser::split_columns<X>(args);
  }
};

}  // namespace fx_fuser::linear_split

// FX_FUSER_LINEAR_SPLIT(Epilogue, scalars, Acc, Out, X, Operands...)
#define FX_FUSER_LINEAR_SPLIT(...)                                                            \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kLinearThreads, 1)                   \
      fx_fuser_linear_split(const __grid_constant__ fx_fuser::LinearSplitArgs args) {         \
    fx_fuser::linear_split::run<false, __VA_ARGS__>(args);                                    \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kLinearThreads, 1)                   \
      fx_fuser_linear_split_n_major(const __grid_constant__ fx_fuser::LinearSplitArgs args) { \
    fx_fuser::linear_split::run<true, __VA_ARGS__>(args);                                     \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kLinearThreads, 1)                   \
      fx_fuser_linear_split_chunk(const __grid_constant__ fx_fuser::LinearSplitArgs args) {   \
    fx_fuser::linear_split::Around<__VA_ARGS__>::run_chunk<false>(args);                      \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kLinearThreads, 1)                   \
      fx_fuser_linear_split_chunk_n_major(                                                    \
          const __grid_constant__ fx_fuser::LinearSplitArgs args) {                           \
    fx_fuser::linear_split::Around<__VA_ARGS__>::run_chunk<true>(args);                       \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSumThreads)                         \
      fx_fuser_linear_split_sum(const __grid_constant__ fx_fuser::LinearSumArgs args) {       \
    fx_fuser::linear_split::Around<__VA_ARGS__>::run_sum(args);                               \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSplitThreads)                       \
      fx_fuser_linear_split_rows(const __grid_constant__ fx_fuser::SplitArgs args) {          \
    fx_fuser::linear_split::Around<__VA_ARGS__>::split_rows(args);                            \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSplitThreads)                       \
      fx_fuser_linear_split_columns(const __grid_constant__ fx_fuser::SplitArgs args) {       \
    fx_fuser::linear_split::Around<__VA_ARGS__>::split_columns(args);                         \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kCopyThreads)                        \
      fx_fuser_copy_rows(const __grid_constant__ fx_fuser::CopyRowsArgs args) {               \
    fx_fuser::copy_rows(args);                                                                \
  }
