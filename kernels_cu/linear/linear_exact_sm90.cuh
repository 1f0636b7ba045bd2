// x weightᵀ in fp32, for two 16-bit operands of one type: the product of two 16-bit values is exact
// in fp32, so one product on the tensor cores is as accurate as an fp32 product of the upcast
// operands.
//
// This is linear_dense_sm90.cuh with another main loop: the tensor core truncates when it
// accumulates, so every 64 of k the accumulators are added to sums in fp32 registers, as in the
// split product (linear_split_sm90.cuh). Two sets of accumulators alternate: the tensor core
// computes the next 64 of k while the last ones are added.
//
//   FX_FUSER_LINEAR_EXACT(Epilogue, /*scalars*/ 0, /*Acc*/ float, /*Out*/ float,
//                         /*x, weight*/ __nv_bfloat16)
//
// There is no bias and no z: both would have the operands' type.
#pragma once

#include "linear/linear_dense_sm90.cuh"

namespace fx_fuser::dense {

struct ExactLoop {
  template <class In, class Layout, class TileEpilogue>
  static __device__ __forceinline__ void consume(const LinearDenseArgs& args,
                                                 typename Layout::Shared& shared, int consumer,
                                                 TileEpilogue& tile_epilogue);
};

template <class In, class Layout, class TileEpilogue>
__device__ __forceinline__ void ExactLoop::consume(const LinearDenseArgs& args,
                                                   typename Layout::Shared& shared, int consumer,
                                                   TileEpilogue& tile_epilogue) {
  static_assert(kIs16BitFloat<In> && Layout::kSubtiles == 1);
  constexpr int kStepK = kDenseStepBytes / sizeof(In);
  constexpr int kInstructions = kDenseStepBytes / 32;
  constexpr int kSums = Layout::kSumsOfSubtile;
  static_assert(3 * kSums <= kConsumerRegisters - 40, "the accumulators spill");
  const int lane = threadIdx.x % 32;
  const int k_tiles = (args.k + kStepK - 1) / kStepK;

  typename Layout::PipelineState pipeline;
  int previous = 0;  // the slot whose products are added next
  const auto issue = [&](float (&accumulator)[kSums]) {
    auto& stage = shared.stage[pipeline.slot];
    const uint64_t weight = ptx::matrix_descriptor(
        ptx::uniform(ptx::shared_address(stage.weight[consumer * kSubtileN])));
    const uint64_t x = ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(stage.x)));
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
    ptx::pin(accumulator);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      ptx::Wgmma<In>::run(accumulator, weight + 2 * i, x + 2 * i, i > 0);
    }
    ptx::wgmma_commit();
    pipeline.advance();
  };

  for (int index = Layout::first_tile(); index < args.tiles; index += Layout::tile_step()) {
    float sum[1][kSums];
    float even[kSums];
    float odd[kSums];
#pragma unroll
    for (float& one : sum[0]) one = 0;
    // Adds the older of two groups in flight or, if `last`, the only one.
    const auto add = [&](float (&accumulator)[kSums], bool last) {
      if (last) {
        ptx::wgmma_wait<0>();
      } else {
        ptx::wgmma_wait<1>();
      }
      ptx::pin(accumulator);
      release<Layout>(shared, previous, lane);
      if (++previous == Layout::kStages) previous = 0;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[0][i] += accumulator[i];
    };
    tile_epilogue.begin(index);
    issue(even);
    int k_tile = 1;
    for (; k_tile + 1 < k_tiles; k_tile += 2) {
      issue(odd);
      add(even, false);
      issue(even);
      add(odd, false);
    }
    if (k_tile < k_tiles) {
      issue(odd);
      add(even, false);
      tile_epilogue.load_first();
      add(odd, true);
    } else {
      tile_epilogue.load_first();
      add(even, true);
    }
    tile_epilogue(sum);
  }
}

}  // namespace fx_fuser::dense

// FX_FUSER_LINEAR_EXACT(Epilogue, scalars, Acc, Out, In)
#define FX_FUSER_LINEAR_EXACT(...)                                   \
  FX_FUSER_LINEAR_KERNEL(0, fx_fuser::dense::ExactLoop, __VA_ARGS__) \
  FX_FUSER_LINEAR_KERNEL(1, fx_fuser::dense::ExactLoop, __VA_ARGS__) \
  FX_FUSER_LINEAR_KERNEL(2, fx_fuser::dense::ExactLoop, __VA_ARGS__)
