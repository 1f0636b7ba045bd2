// out = softmax(scale · q kᵀ) v in fp32, by fp16 halves, for sm_90a.
//
// x = (hi + lo) / scale with two fp16 and a power of two. Each product is three: hi·hi, hi·lo and
// lo·hi, small ones first, into one fp32 accumulator: lo is not scaled beside hi, since an fp16
// within its normal range is followed by 2^-25 in its subnormal one. Scales are of the data: one
// for each row of q, for each tile of k, for each tile of v. Those of q and k go with the logits'
// scale. That of v goes with the factor by which softmax rescales earlier results, and never grows.
//
// The tensor core truncates where it adds up. So the products p v of each tile of keys begin at
// zero, and fp32 sums take them: by the multiply-add that rescales, so this costs registers alone.
//
// Blocks are persistent. TMA brings fp32 tiles; a producer warpgroup makes halves of them, in the
// layout that wgmma reads; consumer warpgroups of 64 queries each take turns at the tensor core, so
// that one's softmax runs beside the others' products. NOTES.md has the arithmetic.
//
//   FX_FUSER_ATTENTION_SPLIT(/*shape*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float, /*Out*/ float,
//                            /*q, k, v*/ float)
#pragma once

#include "attention/attention_split_feed_sm90.cuh"
#include "attention/attention_split_rows.cuh"
#include "common/wgmma_sm90.cuh"

namespace fx_fuser::attention_split {

using Product = ptx::WgmmaOfRegisters<__half>;

// ---- products -----------------------------------------------------------------------------------

// score = q kᵀ, in the scales of both.
template <class L>
__device__ __forceinline__ void issue_scores(float (&score)[L::kScores],
                                             const QueryHalves<L>& query,
                                             const typename L::Tile& tile,
                                             const typename L::Shared& shared, int consumer) {
  constexpr int kStep = kInstructionK * 2 / 16;  // in the unit of descriptors, 16 bytes
  constexpr int kOfSpan = kHalves / kInstructionK;
  constexpr int kSpanStep = L::kKeys * kSpan / 16;
  constexpr int kQuerySpanStep = kAttentionRows * kSpan / 16;
  const auto descriptor = [](const void* at) {
    return ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(at)));
  };
  const uint64_t key_hi = descriptor(tile.part[0]);
  const uint64_t key_lo = descriptor(tile.part[1]);
#pragma unroll
  for (int i = 0; i < L::kSteps; ++i) {
    const int at = i / kOfSpan * kSpanStep + i % kOfSpan * kStep;
    Product::run(score, query.hi[i], key_lo + at, i > 0);
  }
#pragma unroll
  for (int i = 0; i < L::kSteps; ++i) {
    const int at = i / kOfSpan * kSpanStep + i % kOfSpan * kStep;
    if constexpr (L::kKeepsLo) {
      Product::run(score, query.lo[i], key_hi + at, true);
    } else {
      const uint64_t lo = descriptor(shared.query_lo[consumer]);
      ptx::Wgmma<__half>::run(score, lo + i / kOfSpan * kQuerySpanStep + i % kOfSpan * kStep,
                              key_hi + at, true);
    }
  }
#pragma unroll
  for (int i = 0; i < L::kSteps; ++i) {
    const int at = i / kOfSpan * kSpanStep + i % kOfSpan * kStep;
    Product::run(score, query.hi[i], key_hi + at, true);
  }
}

// product = p v of one tile of keys.
template <class L>
__device__ __forceinline__ void issue_results(float (&product)[L::kSums], const Weights<L>& weights,
                                              const typename L::Tile& tile) {
  constexpr int kStep = kInstructionK * kSpan / 16;
  constexpr int kNextSpan = L::kKeys * kSpan;
  const auto descriptor = [](const void* at) {
    return ptx::transposed_descriptor(ptx::uniform(ptx::shared_address(at)), kNextSpan);
  };
  const uint64_t value_hi = descriptor(tile.part[0]);
  const uint64_t value_lo = descriptor(tile.part[1]);
  constexpr int kSteps = Weights<L>::kSteps;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    Product::run_transposed(product, weights.hi[i], value_lo + i * kStep, i > 0);
    Product::run_transposed(product, weights.lo[i], value_hi + i * kStep, true);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    Product::run_transposed(product, weights.hi[i], value_hi + i * kStep, true);
  }
}

// ---- consumers ----------------------------------------------------------------------------------

template <class L>
__device__ __forceinline__ void add_up(float (&result)[L::kSums], const float (&product)[L::kSums],
                                       const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < L::kSums; ++i) {
    result[i] = fmaf(result[i], rescale[i / 2 % 2], product[i]);
  }
}

template <class L>
struct Consumer {
  const AttentionSplitArgs& args;
  typename L::Shared& shared;
  Place place;
  Turns<L::kConsumers> turns;
  typename L::PipelineState pipeline;

  __device__ __forceinline__ void wait() const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
  }
  __device__ __forceinline__ void release() {
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[pipeline.slot]));
    }
    pipeline.advance();
  }

  __device__ __forceinline__ void run(const Unit& unit) {
    QueryHalves<L> query;
    query.load(args, shared, unit, place);
    RowState state;
    state.clear();
    float value_scale = 1;
    float result[L::kSums];
#pragma unroll
    for (float& one : result) one = 0;
    const int first_query = unit.first_query + place.consumer * kAttentionRows;
#pragma unroll 1
    for (int tile = 0; tile < unit.tiles; ++tile) {
      float score[L::kScores];
      wait();
      float unscale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Where it is nothing at all, a hidden score must stay an infinity.
        unscale[r] = fmaxf(query.unscale[r] * shared.factor[pipeline.slot], 0x1p-126f);
      }
      // Pinned, else ptxas moves what made them between the products, and serialises those.
      ptx::pin(score);
      query.pin();
      turns.take();
      ptx::wgmma_fence();
      issue_scores<L>(score, query, shared.tile[pipeline.slot], shared, place.consumer);
      ptx::wgmma_commit();
      turns.pass();
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      release();

      const int first_key = tile * L::kKeys;
      const int seen = args.is_causal ? min(args.keys, first_query + 1) : args.keys;
      if (first_key + L::kKeys > seen) hide<L>(args, unit, place, first_key, score);
      Weights<L> weights;
      state.template take<L>(score, unscale, weights);

      wait();
      const float scale = shared.factor[pipeline.slot];
#pragma unroll
      for (float& one : state.rescale) one *= scale * Scale::unscale_of(value_scale);
      value_scale = scale;
      float product[L::kSums];
      ptx::pin(product);
      weights.pin();
      turns.take();
      ptx::wgmma_fence();
      issue_results<L>(product, weights, shared.tile[pipeline.slot]);
      ptx::wgmma_commit();
      turns.pass();
      ptx::wgmma_wait<0>();
      ptx::pin(product);
      release();
      add_up<L>(result, product, state.rescale);  // beside another consumer's products
    }
    store<L>(args, unit, place, state, value_scale, result);
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

template <int kShape>
__device__ __forceinline__ void run(const AttentionSplitArgs& args) {
  using L = Layout<kShape>;
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < L::kSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), 4 /*warps*/ * L::kConsumers);
    }
    for (int slot = 0; slot < L::kStaged; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.arrived[slot]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup >= L::kConsumers) {
    ptx::give_registers<L::kProducerRegisters>();
    feed_tiles<L>(args, shared, static_cast<int>(threadIdx.x) - L::kConsumers * kWarpgroup);
  } else {
    ptx::take_registers<L::kConsumerRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    Consumer<L> consumer{args, shared, Place::of(warpgroup, thread), {warpgroup}, {}};
    consumer.turns.begin();
    for (int index = static_cast<int>(blockIdx.x); index < args.units;
         index += static_cast<int>(gridDim.x)) {
      consumer.run(unit_at<L>(args, index));
    }
    consumer.turns.end();
  }
}

}  // namespace fx_fuser::attention_split

#define FX_FUSER_ATTENTION_SPLIT(shape, ...)                                                   \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kAttentionShapes[shape].threads(), 1) \
      fx_fuser_attention_split(const __grid_constant__ fx_fuser::AttentionSplitArgs args) {    \
    fx_fuser::attention_split::run<shape>(args);                                               \
  }
