// dq, dk and dv of out = softmax(scale · q kᵀ) v in fp32, by fp16 halves, for sm_90a.
//
//   S = scale · q kᵀ   P = exp(S - lse)   D = dO vᵀ   G = P ∘ (D - delta)   delta = sum(out ∘ dO)
//   dv = Pᵀ dO         dq = scale · G k   dk = scale · Gᵀ q
//
// Halves, scales and feed are the forward's (attention_split_sm90.cuh). Rows stay with a warpgroup,
// queries or keys, and their gradient is summed in its registers, while tiles of the others pass:
// so S and D, or their transposes, come out of the tensor core as P and G go into it, in registers,
// nothing is added up in memory, and results are the same bits each time. The price is that S and D
// are made once for dq and once more for dk and dv. At D = 128 registers hold one sum beside its
// product, so that dv has a pass of its own, and S is made three times.
//
// Of G each row has, in each tile, the scale of its largest. Products of each tile begin at zero,
// and fp32 sums take them, with all scales undone.
//
// With dropout D and P that goes into dv are zero where a weight is dropped; the factor of those
// that are kept goes into the results, and delta is divided by it.
//
//   FX_FUSER_ATTENTION_BACKWARD(/*shape*/ 0, /*drops*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                               /*Out*/ float, /*q, k, v*/ float)
#pragma once

#include "attention/attention_backward_delta.cuh"
#include "attention/attention_backward_repair.cuh"
#include "attention/attention_split_feed_sm90.cuh"
#include "attention/attention_split_products_sm90.cuh"

namespace fx_fuser::attention_backward {

// ---- of each score ------------------------------------------------------------------------------

// P and G, for a warpgroup's rows and a tile.
template <class L>
struct Scores {
  float score[L::kScores];
  float other[L::kMakesRows ? L::kScores : 1];  // D, then G
  float score_unscale[2];
  float other_unscale[2];

  // Causal keys see queries from their own on.
  __device__ __forceinline__ void hide_below(const Place& place, const int (&first)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int left = first[r] - 2 * place.c;
#pragma unroll
      for (int i = 0; i < L::kScores; i += 4) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (2 * i + t < left) score[i + 2 * r + t] = minus_infinity();
        }
      }
    }
  }

  // query_of(i): of the eight columns from 2i on.
  template <class QueryOf>
  __device__ __forceinline__ void make(typename L::Shared& shared, const QueryOf& query_of,
                                       Weights<L>& weights, float (&largest)[2]) {
#pragma unroll
    for (int i = 0; i < L::kScores; i += 4) {
      const auto of_queries = query_of(i);
      uint32_t dropped = 0;
      if constexpr (L::kDrops) dropped = Dropped<L>::word_of(shared, i / 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int at = i + 2 * r + t;
          const AttentionOfQuery query = of_queries.at(r, t);
          weight[t] = ptx::exp2(fmaf(score[at], score_unscale[r], -query.lse));
          if constexpr (L::kMakesRows) {
            const float less = fmaf(other[at], other_unscale[r], -query.delta);
            other[at] = weight[t] * (Dropped<L>::has(dropped, at) ? -query.delta : less);
            largest[r] = fmaxf(largest[r], fabsf(other[at]));
          }
          if (Dropped<L>::has(dropped, at)) weight[t] = 0;
        }
        if constexpr (L::kMakesValues) {
          // Not in the exponent, whose fraction it would take.
          constexpr float kScale = 1 / Weights<L>::kUnscale;
          const SplitPair both = split(weight[0] * kScale, weight[1] * kScale);
          weights.hi[i / 8][i / 4 % 2 * 2 + r] = both.hi;
          weights.lo[i / 8][i / 4 % 2 * 2 + r] = both.lo;
        }
      }
    }
  }

  // G as halves; what undoes its scale.
  __device__ __forceinline__ void halve(const float (&largest)[2], Weights<L>& gradient,
                                        float (&unscale)[2]) {
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Scale of_row = Scale::of(largest_of_row(largest[r]));
      scale[r] = of_row.scale;
      unscale[r] = of_row.unscale;
    }
#pragma unroll
    for (int i = 0; i < L::kScores; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = i + 2 * r;
        const SplitPair both = split(other[at] * scale[r], other[at + 1] * scale[r]);
        gradient.hi[i / 8][i / 4 % 2 * 2 + r] = both.hi;
        gradient.lo[i / 8][i / 4 % 2 * 2 + r] = both.lo;
      }
    }
  }
};

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

  __device__ __forceinline__ void wait(const State& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[at.slot()]), at.phase());
  }
  __device__ __forceinline__ void release(const State& at) const {
    __syncwarp();  // all lanes have read what lies beside the tile: its factor, its queries
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[at.slot()]));
    }
  }
  __device__ __forceinline__ int& unit_of_warp() const {
    return shared.unit_of_warp[ptx::thread_index() / 32];
  }
  __device__ __forceinline__ TilesSoFar& so_far_of_warp(bool second) const {
    return shared.so_far_of_warp[ptx::thread_index() / 32][second];
  }
  // unscale: of G's rows. A row's four lanes have the same.
  __device__ __forceinline__ void keep_largest(const float (&unscale)[2]) const {
    const Place place = Here::place();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint8_t& exponent = shared.exponent[place.consumer][place.row + 8 * r];
      exponent = max(uint32_t{exponent}, __float_as_uint(unscale[r]) >> 23);
    }
  }
  // What is known of the tile, and of those before it, for the unit's end: no register holds it.
  __device__ __forceinline__ void keep(bool second, const State& at) const {
    const uint32_t from = ptx::shared_address(&shared.beside[at.slot()].all);
    const uint32_t to = ptx::shared_address(&so_far_of_warp(second));
    // All lanes have the same; one alone takes registers at dk's products, and saves some at dq's.
    if (L::kHasColumns || ptx::thread_index() % 32 == 0) {
      ptx::store_shared_pair(to, ptx::load_shared_pair(from));
    }
  }
  __device__ __forceinline__ const void* second_hi() const {
    if constexpr (!L::kKeepsSecond) return shared.second_hi.of[Here::consumer()];
    return nullptr;
  }

  __device__ __forceinline__ void load(const Unit& unit) {
    const Place place = Here::place();
    const int head = unit.head / args.heads_of_rows;
    const auto load_one = [&](auto& halves, const AttentionRows& rows, const void* hi,
                              const void* lo) {
      const float* from[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = place.row_of(unit, r);
        from[r] = row < args.row_count ? row_at(rows, unit.batch, head, row) : nullptr;
      }
      const uint32_t hi_at = hi == nullptr ? 0 : ptx::shared_address(hi);
      halves.load(from, args.d, place, hi_at, ptx::shared_address(lo));
    };
    load_one(first, args.rows[0], nullptr, shared.first_lo.of[Here::consumer()]);
    if constexpr (L::kMakesRows) {
      load_one(second, args.rows[1], second_hi(), shared.second_lo.of[Here::consumer()]);
    }
    // To shared memory, since only each tile needs them, and registers are few.
    if (place.c == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shared.unscale[Here::consumer()][place.row + 8 * r] =
            make_float2(first.unscale[r], L::kMakesRows ? second.unscale[r] : 0);
        shared.exponent[Here::consumer()][place.row + 8 * r] = 0;
      }
    }
    if constexpr (!L::kHasColumns) {
      const int64_t of_head = int64_t{unit.batch * args.heads + unit.head} * args.padded;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const AttentionOfQuery query = args.of_queries[of_head + place.row_of(unit, r)].of;
        if (place.c == 0) shared.column[place.consumer][place.row + 8 * r] = query;
      }
    }
    first.publish(place);
  }

  // S of the first tile, and D of the second.
  __device__ __forceinline__ void multiply_rows(const State& of_first, const State& of_second,
                                                Scores<L>& scores) {
    wait(of_first);
    if constexpr (L::kMakesRows) wait(of_second);
    // Pinned, else ptxas moves what made them between the products, and serialises those.
    ptx::pin(scores.score);
    first.pin();
    if constexpr (L::kMakesRows) {
      ptx::pin(scores.other);
      second.pin();
    }
    Here::turns().take();
    ptx::wgmma_fence();
    issue_scores(scores.score, first, nullptr, shared.first_lo.of[Here::consumer()],
                 shared.tile[of_first.slot()]);
    if constexpr (L::kMakesRows) {
      issue_scores(scores.other, second, second_hi(), shared.second_lo.of[Here::consumer()],
                   shared.tile[of_second.slot()]);
    }
    ptx::wgmma_commit();
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(scores.score);
    if constexpr (L::kMakesRows) ptx::pin(scores.other);
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
      scores.hide_below(place, edge);
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
      const float of_tile = shared.beside[of_first.slot()].factor * args.scale_of_sums;
      // Where it is nothing at all, a hidden score must stay an infinity.
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

  // sum += weights · tile, with its scale undone, and those of rows.
  __device__ __forceinline__ void add_product(float (&sum)[L::kSums], Weights<L>& weights,
                                              bool second, const State& at, float left,
                                              float right) {
    keep(second, at);
    const float of_tile = shared.beside[at.slot()].factor;
    const float unscale[2] = {left * of_tile, right * of_tile};
    float product[L::kSums];
    ptx::pin(product);
    weights.pin();
    Here::turns().take();
    ptx::wgmma_fence();
    issue_results<L>(product, weights, shared.tile[at.slot()]);
    ptx::wgmma_commit();
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(product);
    release(at);
#pragma unroll
    for (int i = 0; i < L::kSums; ++i) sum[i] = fmaf(product[i], unscale[i / 2 % 2], sum[i]);
  }

  __device__ __forceinline__ void run(int index) {
    const Unit unit = L::unit_at(args, index);
    __syncwarp();  // all lanes have read what is written over
    if (threadIdx.x % 32 == 0) {
      unit_of_warp() = index;
      so_far_of_warp(false) = so_far_of_warp(true) = TilesSoFar{};
    }
    load(unit);
    float d_values[L::kMakesValues ? L::kSums : 1];
    float d_rows[L::kMakesRows ? L::kSums : 1];
#pragma unroll
    for (float& one : d_values) one = 0;
#pragma unroll
    for (float& one : d_rows) one = 0;
#pragma unroll 1
    for (int tile = unit.first_tile; L::has_tile(args, unit, tile); ++tile) {
      const State of_first = pipeline;  // keys for q, queries for k
      pipeline.advance();
      const State of_second = pipeline;  // values for dO, dO for v
      pipeline.advance();
      if constexpr (L::kDrops) {  // beside another consumer's products
        const Place place = Here::place();
        Dropped<L>::find(shared, args.dropout, head_of(args, unit), place.g, place.c,
                         place.row_of(unit, 0), tile * L::kKeys);
      }
      Scores<L> scores;
      multiply_rows(of_first, of_second, scores);
      const float second_factor = L::kMakesRows ? shared.beside[of_second.slot()].factor : 0;
      if constexpr (!L::kMakesValues) {
        keep(true, of_second);
        release(of_second);
      }
      hide(unit, tile, scores);
      Weights<L> weights;
      Weights<L> gradient;
      float unscale[2];
      weigh(of_first, second_factor, scores, weights, gradient, unscale);
      if constexpr (!L::kMakesRows) {
        keep(false, of_first);
        release(of_first);
        wait(of_second);
      }
      if constexpr (L::kMakesValues) {
        constexpr float kUnscale = Weights<L>::kUnscale;
        add_product(d_values, weights, true, of_second, kUnscale, kUnscale);
      }
      if constexpr (L::kMakesRows) {
        add_product(d_rows, gradient, false, of_first, unscale[0], unscale[1]);
        keep_largest(unscale);
      }
    }
    // Found anew, so that no register holds it meanwhile.
    const Unit done = L::unit_at(args, unit_of_warp());
    store(done, d_values, d_rows);
    if (!is_sure(done, d_values, d_rows)) {
      const Place place = Here::place();
      Repair<L>{args, done}.run(place.row_of(done, 0) - place.g);
    }
  }

  // Are all gradients of the warp? The last tiles' words are of all of the unit's.
  template <int kValues, int kRows>
  __device__ __forceinline__ bool is_sure(const Unit& unit, const float (&d_values)[kValues],
                                          const float (&d_rows)[kRows]) const {
    const Place place = Here::place();
    const auto columns = static_cast<float>(max(unit.tiles - unit.first_tile, 0) * L::kKeys);
    __syncwarp();  // what lanes have kept
    const TilesSoFar of_first = so_far_of_warp(false);
    const TilesSoFar of_second = so_far_of_warp(true);
    float first_squares[2];
    float second_squares[2];
    first.squares(place, 0, first_squares);
    if constexpr (L::kMakesRows) {
      const uint32_t hi_at = L::kKeepsSecond ? 0 : ptx::shared_address(second_hi());
      second.squares(place, hi_at, second_squares);
    }
    bool sure = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = place.row_of(unit, r);
      const float2 unscale = shared.unscale[place.consumer][place.row + 8 * r];
      bool of_row = is_product_sure(unscale.x * args.log_scale, args.log_scale, first_squares[r],
                                    kLeastOperand, of_first.loss, kBearable);
      if constexpr (L::kMakesRows) {
        // Of keys the producer has compared with each query's terms.
        float terms = 1;
        if constexpr (!L::kHasColumns) {
          const int64_t of_head = int64_t{unit.batch * args.heads + unit.head} * args.padded;
          terms = args.of_queries[of_head + row].terms;
        }
        const float least = L::kHasColumns ? kLeastOperand : kLeastGradient;
        of_row &= is_product_sure(unscale.y, 1, second_squares[r], least, of_second.loss,
                                  kBearable * terms);
        const uint32_t exponent = shared.exponent[place.consumer][place.row + 8 * r];
        of_row &=
            is_result_sure(largest_in_row(d_rows, r),
                           lost_of_gradients(exponent, of_first.loss, of_first.largest, columns));
      }
      if constexpr (L::kMakesValues) {
        of_row &= is_result_sure(largest_in_row(d_values, r), lost_of_values(of_second.loss));
      }
      sure &= of_row || row >= args.row_count;
    }
    return __all_sync(0xFFFFFFFF, sure);
  }

  template <int kValues, int kRows>
  __device__ __forceinline__ void store(const Unit& unit, const float (&d_values)[kValues],
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
        const float factor = L::kDrops ? args.dropout.factor : 1;
        store_row(to(args.d_values), args.d, place, r, d_values, factor);
      }
      if constexpr (L::kMakesRows) {
        store_row(to(args.d_rows), args.d, place, r, d_rows, args.scale);
      }
    }
  }
};

// ---- the kernels --------------------------------------------------------------------------------

template <int kShape, bool kDrops, Pass kPass>
__device__ __forceinline__ void run(const AttentionBackwardArgs& args) {
  using L = Layout<kShape, kPass, kDrops>;
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
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
    Consumer<L> consumer{args, shared, {}, {}, {}};
    Consumer<L>::Here::turns().begin();
    for (int index = static_cast<int>(blockIdx.x); index < args.units;) {
      consumer.run(index);
      index = consumer.unit_of_warp() + static_cast<int>(gridDim.x);
    }
    Consumer<L>::Here::turns().end();
  }
}

// dk, and dv where it has no pass of its own.
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
