// Split attention, backward: dq, dk and dv of out = softmax(scale · q kᵀ) v in fp32, by fp16
// halves, for sm_90a.
//
//   S = scale · q kᵀ   P = exp(S - lse)   D = dO vᵀ   G = P ∘ (D - delta)   delta = sum(out ∘ dO)
//   dv = Pᵀ dO         dq = scale · G k   dk = scale · Gᵀ q
//
// Halves, scales and producers are the forward's (attention_split_sm90.cuh). A consumer warpgroup
// keeps its rows, queries or keys, sums their gradient in registers and iterates over tiles of the
// others. So S and D, or their transposes, have the registers' layout that P and G need as
// operands, nothing is accumulated in memory, and results are bit for bit reproducible. The price:
// S and D are computed once for dq and again for dk and dv. At D = 128 registers hold only one sum
// in addition to its product, so dv has a pass of its own, and S is computed three times.
//
// Each row of G has a scale per tile, from its largest. A tile's products begin at zero and are
// added to fp32 sums, with all scales undone.
//
// With dropout, D and the P in dv are zero for dropped weights; the factor of kept weights is
// applied to the results, and delta is divided by it.
//
//   FX_FUSER_ATTENTION_BACKWARD(/*shape*/ 0, /*drops*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                               /*Out*/ float, /*q, k, v*/ float)
#pragma once

#include "attention/attention_backward_delta.cuh"
#include "attention/attention_backward_repair.cuh"
#include "attention/attention_backward_scores_sm90.cuh"
#include "attention/attention_backward_sure.cuh"
#include "attention/attention_split_feed_sm90.cuh"
#include "attention/attention_split_products_sm90.cuh"

namespace fx_fuser::attention_backward {

// ---- consumers ----------------------------------------------------------------------------------

template <class L>
struct Consumer {
  using Here = ConsumerThread<L::kConsumers>;
  using State = typename L::PipelineState;
  const AttentionBackwardArgs& args;
  typename L::Shared& shared;
  State pipeline;
  RowHalves<L::kD, true, false> first;              // q or k
  RowHalves<L::kD, L::kKeepsSecond, false> second;  // dO or v
  RowValues<L::kD> values[2];                       // the same in fp32, as loaded
  AttentionOfQuery of_rows[2];                      // if rows are queries

  __device__ __forceinline__ void wait(const State& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[at.slot()]), at.phase());
  }
  __device__ __forceinline__ void release(const State& at) const {
    __syncwarp();  // all lanes have read the tile's factor and queries
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[at.slot()]));
    }
  }
  __device__ __forceinline__ int& unit_of_warp() const {
    return shared.unit_of_warp[ptx::thread_index() / 32];
  }
  __device__ __forceinline__ bool has_unit(int number) const {
    return static_cast<int>(blockIdx.x) + number * static_cast<int>(gridDim.x) < args.units;
  }
  // The producer has published it ahead of the last tile of the previous unit.
  __device__ __forceinline__ Unit unit_of(int number) const {
    if constexpr (L::kTellsUnits) {
      if (number > 0) return shared.unit[number % L::kUnits];
    }
    return L::unit_at(args, static_cast<int>(blockIdx.x) + number * static_cast<int>(gridDim.x));
  }
  __device__ __forceinline__ const void* second_hi() const {
    if constexpr (!L::kKeepsSecond) return shared.second_hi.of[Here::consumer()];
    return nullptr;
  }

  __device__ __forceinline__ void bring(const Unit& unit, int which) {
    const Place place = Here::place();
    const int head = unit.head / args.heads_of_rows;
    const float* from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = place.row_of(unit, r);
      from[r] = row < args.row_count ? row_at(args.rows[which], unit.batch, head, row) : nullptr;
    }
    values[which].load(from, args.d, place);
  }
  __device__ __forceinline__ void bring_queries(const Unit& unit) {
    if constexpr (!L::kHasColumns) {
      const int64_t of_head = int64_t{unit.batch * args.heads + unit.head} * args.padded;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        of_rows[r] = args.of_queries[of_head + Here::place().row_of(unit, r)].of;
      }
    }
  }
  // Starts to load the unit's rows.
  __device__ __forceinline__ void begin(const Unit& unit) {
    bring(unit, 0);
    if constexpr (L::kBeginsWithBoth) bring(unit, 1);
    bring_queries(unit);
  }

  __device__ __forceinline__ void begin_next(int number) {
    values[0] = values[1] = {};  // ends the live ranges of the last unit's values
    of_rows[0] = of_rows[1] = {};
    if (has_unit(number + 1)) begin(unit_of(number + 1));
  }

  __device__ __forceinline__ void make_halves(const Unit& unit) {
    const Place place = Here::place();
    const int here = Here::consumer();
    if constexpr (!L::kBeginsEarly) bring(unit, 0);
    if constexpr (L::kBeginsEarly && !L::kBeginsWithBoth) bring(unit, 1);
    first.make(values[0], place, 0, ptx::shared_address(shared.first_lo.of[here]));
    if constexpr (L::kMakesRows) {
      if constexpr (!L::kBeginsEarly) bring(unit, 1);
      second.make(values[1], place, L::kKeepsSecond ? 0 : ptx::shared_address(second_hi()),
                  ptx::shared_address(shared.second_lo.of[here]));
    }
    if constexpr (!L::kBeginsEarly) bring_queries(unit);
    // Kept in shared memory: they are needed once per tile, and registers are few.
    if (place.c == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = place.row + 8 * r;
        shared.unscale[here][row] =
            make_float2(first.unscale[r], L::kMakesRows ? second.unscale[r] : 0);
        if constexpr (!L::kHasColumns) shared.column[here][row] = of_rows[r];
      }
    }
    first.publish(place);
  }

  // Starts S, from the first tile, and D, from the second.
  __device__ __forceinline__ void issue_rows(const State& of_first, const State& of_second,
                                             Scores<L>& scores) {
    // Without pins ptxas moves code that computes these between the products and serialises them.
    ptx::pin(scores.score);
    first.pin();
    if constexpr (L::kMakesRows) {
      ptx::pin(scores.other);
      second.pin();
    }
    ptx::wgmma_fence();
    issue_scores(scores.score, first, nullptr, shared.first_lo.of[Here::consumer()],
                 shared.tile[of_first.slot()]);
    if constexpr (L::kMakesRows) {
      issue_scores(scores.other, second, second_hi(), shared.second_lo.of[Here::consumer()],
                   shared.tile[of_second.slot()]);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void wait_for_rows(Scores<L>& scores) const {
    ptx::wgmma_wait<0>();
    ptx::pin(scores.score);
    if constexpr (L::kMakesRows) ptx::pin(scores.other);
  }
  __device__ __forceinline__ void multiply_rows(const Unit& unit, int tile, const State& of_first,
                                                const State& of_second, Scores<L>& scores) {
    find_dropped(unit, tile);  // overlaps another consumer's products
    wait(of_first);
    if constexpr (L::kMakesRows) wait(of_second);
    Here::turns().take();
    issue_rows(of_first, of_second, scores);
    Here::turns().pass();
    wait_for_rows(scores);
  }
  __device__ __forceinline__ void find_dropped(const Unit& unit, int tile) const {
    if constexpr (L::kDrops) {
      const Place place = Here::place();
      Dropped<L>::find(shared, args.dropout, head_of(args, unit), place.g, place.c,
                       place.row_of(unit, 0), tile * L::kKeys);
    }
  }

  __device__ __forceinline__ void hide(const Unit& unit, int tile, Scores<L>& scores) const {
    const int first_column = tile * L::kKeys;
    const int first_row = unit.first_row + Here::consumer() * kAttentionRows;
    const Place place = Here::place();
    int edge[2];
    if constexpr (L::kHasColumns) {
      if (!args.is_causal || first_column >= first_row + kAttentionRows) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) edge[r] = place.row_of(unit, r) - first_column;
      hide_below(place, edge, scores.score);
    } else {
      const int seen = args.is_causal ? min(args.column_count, first_row + 1) : args.column_count;
      if (first_column + L::kKeys <= seen) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = place.row_of(unit, r);
        edge[r] =
            (args.is_causal ? min(args.column_count, row + 1) : args.column_count) - first_column;
      }
      hide_from(place, edge, scores.score);
    }
  }

  __device__ __forceinline__ void weigh(const State& of_first, float second_factor,
                                        Scores<L>& scores, Weights<L>& weights,
                                        Weights<L>& gradient, float (&unscale)[2]) const {
    float largest[2] = {0, 0};
    const Place place = Here::place();
    const uint32_t unscale_at = ptx::shared_address(&shared.unscale[place.consumer][place.row]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t at = unscale_at + 8 * r * sizeof(float2);
      const float of_tile = shared.factor[of_first.slot()] * args.scale_of_sums;
      // Never zero: a hidden score must stay an infinity.
      scores.score_unscale[r] = fmaxf(ptx::load_shared_word(at) * of_tile, 0x1p-126f);
      if constexpr (L::kMakesRows) {
        scores.other_unscale[r] = ptx::load_shared_word(at + 4) * second_factor;
      }
    }
    if constexpr (L::kHasColumns) {
      const uint32_t at = ptx::shared_address(shared.column[of_first.slot()]) +
                          2 * place.c * uint32_t{sizeof(AttentionOfQuery)};
      scores.make(
          shared,
          [&](int i) {
            return QueriesOfColumns{ptx::load_shared(at + 2 * i * sizeof(AttentionOfQuery))};
          },
          weights, largest);
    } else {
      const uint32_t at = ptx::shared_address(&shared.column[place.consumer][place.row]);
      QueriesOfRows of_rows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t of_row = at + 8 * r * sizeof(AttentionOfQuery);
        of_rows.of_row[r] = {ptx::load_shared_word(of_row), ptx::load_shared_word(of_row + 4)};
      }
      scores.make(shared, [&](int) { return of_rows; }, weights, largest);
    }
    if constexpr (L::kMakesRows) scores.halve(largest, gradient, unscale);
  }

  // Starts product = weights · tile.
  __device__ __forceinline__ void issue_product(float (&product)[L::kSums], Weights<L>& weights,
                                                const State& at) const {
    ptx::pin(product);
    weights.pin();
    ptx::wgmma_fence();
    issue_results<L>(product, weights, shared.tile[at.slot()]);
    ptx::wgmma_commit();
  }
  // Adds a product with the scales of rows and of the tile undone.
  static __device__ __forceinline__ void add_product(float (&sum)[L::kSums],
                                                     const float (&product)[L::kSums],
                                                     const float (&unscale)[2]) {
#pragma unroll
    for (int i = 0; i < L::kSums; ++i) sum[i] = fmaf(product[i], unscale[i / 2 % 2], sum[i]);
  }
  __device__ __forceinline__ void add_in_turn(float (&sum)[L::kSums], Weights<L>& weights,
                                              const State& at, float left, float right) const {
    const float of_tile = shared.factor[at.slot()];
    const float unscale[2] = {left * of_tile, right * of_tile};
    float product[L::kSums];
    Here::turns().take();
    issue_product(product, weights, at);
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(product);
    release(at);
    add_product(sum, product, unscale);
  }

  // One tile at a time: a turn for S and D, and one for each gradient.
  template <int kValues, int kRows>
  __device__ __forceinline__ void add_tiles(const Unit& unit, float (&d_values)[kValues],
                                            float (&d_rows)[kRows], LargestScales& largest) {
#pragma unroll 1
    for (int tile = unit.first_tile; L::has_tile(args, unit, tile); ++tile) {
      const State of_first = pipeline;  // keys for q, queries for k
      pipeline.advance();
      const State of_second = pipeline;  // values for dO, dO for v
      pipeline.advance();
      Scores<L> scores;
      multiply_rows(unit, tile, of_first, of_second, scores);
      const float second_factor = L::kMakesRows ? shared.factor[of_second.slot()] : 0;
      if constexpr (!L::kMakesValues) release(of_second);
      hide(unit, tile, scores);
      Weights<L> weights;
      Weights<L> gradient;
      float unscale[2];
      weigh(of_first, second_factor, scores, weights, gradient, unscale);
      if constexpr (!L::kMakesRows) {
        release(of_first);
        wait(of_second);
      }
      if constexpr (L::kMakesValues) {
        constexpr float kUnscale = Weights<L>::kUnscale;
        add_in_turn(d_values, weights, of_second, kUnscale, kUnscale);
      }
      if constexpr (L::kMakesRows) {
        add_in_turn(d_rows, gradient, of_first, unscale[0], unscale[1]);
        largest.take(unscale);
      }
    }
  }

  // A turn has the gradients of a tile, then S and D of the next one, so that all work on scores
  // overlaps the others' turns.
  template <int kValues, int kRows>
  __device__ __forceinline__ void add_tiles_ahead(const Unit& unit, float (&d_values)[kValues],
                                                  float (&d_rows)[kRows], LargestScales& largest) {
    if (!L::has_tile(args, unit, unit.first_tile)) return;
    State of_first = pipeline;
    pipeline.advance();
    State of_second = pipeline;
    pipeline.advance();
    Scores<L> scores;
    multiply_rows(unit, unit.first_tile, of_first, of_second, scores);
#pragma unroll 1
    for (int tile = unit.first_tile;; ++tile) {
      const float second_factor = shared.factor[of_second.slot()];
      if constexpr (!L::kMakesValues) release(of_second);
      hide(unit, tile, scores);
      Weights<L> weights;
      Weights<L> gradient;
      float unscale[2];
      weigh(of_first, second_factor, scores, weights, gradient, unscale);
      largest.take(unscale);
      const bool has_next = L::has_tile(args, unit, tile + 1);
      const State next_first = pipeline;
      State next_second = pipeline;
      next_second.advance();
      if (has_next) {
        wait(next_first);
        wait(next_second);
      }
      Here::turns().take();
      float of_values[L::kMakesValues ? L::kSums : 1];
      if constexpr (L::kMakesValues) {
        issue_product(of_values, weights, of_second);
        ptx::wgmma_wait<0>();
        ptx::pin(of_values);
      }
      float product[L::kSums];
      issue_product(product, gradient, of_first);
      if constexpr (L::kMakesValues) {
        constexpr float kUnscale = Weights<L>::kUnscale;
        const float of_both = kUnscale * second_factor;
        release(of_second);
        add_product(d_values, of_values, {of_both, of_both});
      }
      ptx::wgmma_wait<0>();
      ptx::pin(product);
      const auto pass_and_add = [&] {
        Here::turns().pass();
        // Read after the barrier, else ptxas moves the sums ahead of the scores' products.
        const float of_tile = shared.factor[of_first.slot()];
        release(of_first);
        add_product(d_rows, product, {unscale[0] * of_tile, unscale[1] * of_tile});
      };
      if (!has_next) {  // products in flight in only one branch would be serialised
        pass_and_add();
        break;
      }
      issue_rows(next_first, next_second, scores);
      pass_and_add();
      find_dropped(unit, tile + 1);
      wait_for_rows(scores);
      of_first = next_first;
      of_second = next_second;
      pipeline = next_second;
      pipeline.advance();
    }
  }

  // Computes the block's unit of this number.
  __device__ __forceinline__ void run(int number) {
    __syncwarp();  // all lanes have read the previous number
    if (threadIdx.x % 32 == 0) unit_of_warp() = number;
    const Unit unit = unit_of(number);
    make_halves(unit);
    float d_values[L::kMakesValues ? L::kSums : 1];
    float d_rows[L::kMakesRows ? L::kSums : 1];
#pragma unroll
    for (float& one : d_values) one = 0;
#pragma unroll
    for (float& one : d_rows) one = 0;
    LargestScales scales;
    if constexpr (L::kBeginsEarly) {
      add_tiles_ahead(unit, d_values, d_rows, scales);
    } else {
      add_tiles(unit, d_values, d_rows, scales);
    }
    // Read again, so that no register holds it in between.
    const int done_number = unit_of_warp();
    const Unit done = unit_of(done_number);
    const UnitToTest<L> test(args, shared, done, done_number, Here::place(), scales);
    if constexpr (L::kBeginsEarly) begin_next(done_number);
    store(done, test.factor, d_values, d_rows);
    if (test.is_clearly_sure(d_values, d_rows)) return;
    if (!test.is_sure(first, second, second_hi(), d_values, d_rows)) {
      const Place place = Here::place();
      Repair<L>{args, done}.run(place.row_of(done, 0) - place.g);
    }
    // Read again, so that no register holds it in between.
    if constexpr (L::kBeginsEarly) begin_next(unit_of_warp());
  }

  template <int kValues, int kRows>
  __device__ __forceinline__ void store(const Unit& unit, const float (&of_weights)[2],
                                        const float (&d_values)[kValues],
                                        const float (&d_rows)[kRows]) const {
    const Place place = Here::place();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = place.row_of(unit, r);
      if (row >= args.row_count) continue;
      const auto to = [&](const AttentionRows& rows) {
        return row_at(rows, unit.batch, unit.head, row);
      };
      if constexpr (L::kMakesValues) {
        store_row(to(args.d_values), args.d, place, r, d_values, args.scale_of_values);
      }
      if constexpr (L::kMakesRows) {
        store_row(to(args.d_rows), args.d, place, r, d_rows, args.scale * of_weights[r]);
      }
    }
  }
};

// ---- the kernels --------------------------------------------------------------------------------

template <int kShape, bool kDrops, Pass kPass>
__device__ __forceinline__ void run(const AttentionBackwardArgs& args) {
  using L = Layout<kShape, kPass, kDrops>;
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
    Consumer<L> consumer{args, shared, {}, {}, {}, {}, {}};
    Consumer<L>::Here::turns().begin();
    // There are at least as many units as blocks.
    if constexpr (L::kBeginsEarly) consumer.begin(consumer.unit_of(0));
    for (int number = 0; consumer.has_unit(number);) {
      consumer.run(number);
      number = consumer.unit_of_warp() + 1;
    }
    Consumer<L>::Here::turns().end();
  }
}

// dk, and dv if that has no pass of its own.
template <int kShape, bool kDrops>
__device__ __forceinline__ void run_keys(const AttentionBackwardArgs& args) {
  run<kShape, kDrops, Shape<kShape>::kOf.apart ? Pass::kKeys : Pass::kKeysAndValues>(args);
}
template <int kShape, bool kDrops>
__device__ __forceinline__ void run_values(const AttentionBackwardArgs& args) {
  if constexpr (Shape<kShape>::kOf.apart) run<kShape, kDrops, Pass::kValues>(args);
}

}  // namespace fx_fuser::attention_backward

#define FX_FUSER_ATTENTION_PASS(shape, name, ...)                          \
  extern "C" __global__ void __launch_bounds__(                            \
      fx_fuser::kAttentionBackwardShapes[shape].tiles.threads(), 1)        \
      name(const __grid_constant__ fx_fuser::AttentionBackwardArgs args) { \
    fx_fuser::attention_backward::__VA_ARGS__(args);                       \
  }
#define FX_FUSER_ATTENTION_BACKWARD(shape, drops, ...)                                            \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kAttentionDeltaWarps * 32)               \
      fx_fuser_attention_delta(const __grid_constant__ fx_fuser::AttentionDeltaArgs args) {       \
    fx_fuser::attention_backward::find_deltas<(drops) != 0>(args);                                \
  }                                                                                               \
  FX_FUSER_ATTENTION_PASS(shape, fx_fuser_attention_d_queries,                                    \
                          run<shape, (drops) != 0, fx_fuser::attention_backward::Pass::kQueries>) \
  FX_FUSER_ATTENTION_PASS(shape, fx_fuser_attention_d_keys, run_keys<shape, (drops) != 0>)        \
  FX_FUSER_ATTENTION_PASS(shape, fx_fuser_attention_d_values, run_values<shape, (drops) != 0>)
