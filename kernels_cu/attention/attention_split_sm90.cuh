// Split attention: out = softmax(scale · q kᵀ) v in fp32, by fp16 halves, for sm_90a.
//
// x = (hi + lo) / scale with two fp16 and a power of two. Each product is three, hi·hi, hi·lo and
// lo·hi, small ones first, into one fp32 accumulator. lo has no scale of its own: fp16's subnormals
// bound its error by 2^-25. Scales follow the data: one per row of q, per tile of k and per tile of
// v. Those of q and k are undone with the logits' scale; that of v is undone with the factor by
// which softmax rescales earlier results, and never grows.
//
// The tensor core truncates when it accumulates. So the products p v of each tile of keys begin at
// zero and are added to fp32 sums, by the multiply-add that rescales: this costs only registers.
//
// Blocks are persistent. TMA loads fp32 tiles (64 or 128 keys) to a staging ring; a producer
// warpgroup converts them to halves in a second ring, in wgmma's layout (PTX ISA 9.7.15.5); two
// consumer warpgroups of 64 queries each take turns at the tensor core, so that one's softmax
// overlaps the other's products. NOTES.md has the arithmetic.
//
//   FX_FUSER_ATTENTION_SPLIT(/*shape*/ 0, /*drops*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                            /*Out*/ float, /*q, k, v*/ float)
#pragma once

#include "attention/attention_split_feed_sm90.cuh"
#include "attention/attention_split_products_sm90.cuh"
#include "attention/attention_split_repair.cuh"

namespace fx_fuser::attention_split {

// ---- consumers ----------------------------------------------------------------------------------

template <class L>
__device__ __forceinline__ void add_up(float (&result)[L::kSums],
                                       const float (&product)[L::kParts][L::kSums],
                                       const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < L::kSums; ++i) {
    float of_tile = product[0][i];
    if constexpr (L::kParts == 2) of_tile += product[1][i];
    result[i] = fmaf(result[i], rescale[i / 2 % 2], of_tile);
  }
}

template <class L>
struct Consumer {
  using Here = ConsumerThread<L::kConsumers>;
  const AttentionSplitArgs& args;
  typename L::Shared& shared;
  typename L::PipelineState pipeline;
  int nth;         // the unit's number in the block
  int tile_count;  // of the unit
  RowValues<L::kD> values;

  __device__ __forceinline__ const Unit& unit() const { return shared.unit[nth % L::kUnits]; }
  __device__ __forceinline__ bool has_unit() const {
    return static_cast<int>(blockIdx.x) + nth * static_cast<int>(gridDim.x) < args.units;
  }

  __device__ __forceinline__ void wait() const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot()]), pipeline.phase());
  }
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read the tile's factor
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[pipeline.slot()]));
    }
    pipeline.advance();
  }

  // Starts to load the unit's queries.
  __device__ __forceinline__ void begin(const Unit& unit) {
    const Place place = Here::place();
    const float* from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = place.row_of(unit, r);
      from[r] = row < args.queries ? row_at(args.q, unit.batch, unit.head, row) : nullptr;
    }
    values.load(from, args.d, place);
    tile_count = unit.tiles;
  }
  // The producer has published the next unit ahead of the last tile of this one.
  __device__ __forceinline__ void begin_next() {
    values = {};  // ends the live ranges of the last unit's values
    ++nth;
    if (has_unit()) begin(unit());
  }

  // Computes a unit for which begin() was called.
  __device__ __forceinline__ void run() {
    RowHalves<L::kD, true, L::kKeepsLo> query;
    const void* query_lo = nullptr;
    if constexpr (!L::kKeepsLo) query_lo = shared.query_lo.of[Here::consumer()];
    const Place place = Here::place();
    query.make(values, place, 0, L::kKeepsLo ? 0 : ptx::shared_address(query_lo));
    if constexpr (!L::kKeepsLo) query.publish(place);
#pragma unroll
    for (float& one : query.unscale) one *= args.scale_of_sums;
    RowState state;
    state.clear();
    float value_scale = 1;
    float result[L::kSums];
#pragma unroll
    for (float& one : result) one = 0;
#pragma unroll 1
    for (int tile = 0; tile < tile_count; ++tile) {
      float score[L::kScores];
      wait();
      if constexpr (L::kDrops) {  // overlaps another consumer's products
        const Place here = Here::place();
        Dropped<L>::find(shared, args.dropout, head_of(args, unit()), here.g, here.c,
                         here.row_of(unit(), 0), tile * L::kKeys);
      }
      float unscale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Never zero: a hidden score must stay an infinity.
        unscale[r] = fmaxf(query.unscale[r] * shared.factor[pipeline.slot()], 0x1p-126f);
      }
      // Without pins ptxas moves code that computes these between the products and serialises them.
      ptx::pin(score);
      query.pin();
      Here::turns().take();
      ptx::wgmma_fence();
      issue_scores(score, query, nullptr, query_lo, shared.tile[pipeline.slot()]);
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      release();

      const int first_key = tile * L::kKeys;
      int seen = args.keys;
      if (args.is_causal)
        seen = min(seen, unit().first_row + Here::consumer() * kAttentionRows + 1);
      if (first_key + L::kKeys > seen) {
        int end[2];
        const Place here = Here::place();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = here.row_of(unit(), r);
          end[r] = (args.is_causal ? min(args.keys, row + 1) : args.keys) - first_key;
        }
        hide_from(here, end, score);
      }
      Weights<L> weights;
      state.template take<L>(shared, score, unscale, weights);

      wait();
      const float scale = shared.factor[pipeline.slot()];
#pragma unroll
      for (float& one : state.rescale) one *= scale * Scale::unscale_of(value_scale);
      value_scale = scale;
      float product[L::kParts][L::kSums];
#pragma unroll
      for (auto& part : product) ptx::pin(part);
      weights.pin();
      Here::turns().take();
      ptx::wgmma_fence();
      issue_results<L>(product[0], weights, shared.tile[pipeline.slot()]);
      if constexpr (L::kParts == 2) {
        issue_results<L, 1>(product[1], weights, shared.tile[pipeline.slot()]);
      }
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (auto& part : product) ptx::pin(part);
      release();
      add_up<L>(result, product, state.rescale);  // overlaps another consumer's products
    }
    const Unit done = unit();  // read again: no register holds it across the tiles
    const TilesSoFar tiles = shared.so_far[nth % L::kUnits][0];
    if constexpr (L::kBeginsEarly) begin_next();
    const Place at_end = Here::place();
    const float sum[2] = {sum_of_row(state.sum[0]), sum_of_row(state.sum[1])};
    store<L>(args, done, at_end, state, sum, value_scale, result);
    const UnitToTest<L> test{args, done, at_end, sum, value_scale, tiles};
    if (!test.is_clearly_sure(query.unscale, result)) {
      float squares[2];
      query.squares(at_end, 0, squares);
      if (!test.is_sure(query.unscale, squares, result)) {
        repair<L>(args, done, at_end.row_of(done, 0) - at_end.g);
      }
    }
    if constexpr (!L::kBeginsEarly) begin_next();
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

template <int kShape, bool kDrops>
__device__ __forceinline__ void run(const AttentionSplitArgs& args) {
  using L = Layout<kShape, kDrops>;
  // Declared aligned, so that the compiler knows the low bits of descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) L::begin(shared);
  __syncthreads();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup >= L::kConsumers) {
    ptx::give_registers<L::kProducerRegisters>();
    feed_tiles<L>(args, shared, static_cast<int>(threadIdx.x) - L::kConsumers * kWarpgroup);
  } else {
    ptx::take_registers<L::kConsumerRegisters>();
    Consumer<L> consumer{args, shared, {}, 0, 0, {}};
    Consumer<L>::Here::turns().begin();
    // There are at least as many units as blocks.
    consumer.begin(L::unit_at(args, static_cast<int>(blockIdx.x)));
    while (consumer.has_unit()) consumer.run();
    Consumer<L>::Here::turns().end();
  }
}

}  // namespace fx_fuser::attention_split

#define FX_FUSER_ATTENTION_SPLIT(shape, drops, ...)                                            \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kAttentionShapes[shape].threads(), 1) \
      fx_fuser_attention_split(const __grid_constant__ fx_fuser::AttentionSplitArgs args) {    \
    fx_fuser::attention_split::run<shape, (drops) != 0>(args);                                 \
  }
