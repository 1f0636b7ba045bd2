// dq, dk, dv and the bias's gradient for out = softmax(scale · q kᵀ + bias) v with 16-bit operands,
// for sm_90a.
//
//   S = scale · q kᵀ + bias   P = exp(S - lse)   D = dO vᵀ   G = P ∘ (D - delta)
//   dv = Pᵀ dO   dq = scale · G k   dk = scale · Gᵀ q   dbias = G, summed over what shares the bias
//
// With dropout, D and the P in dv are zero for dropped weights; the factor of kept weights is
// applied to D and to dv.
//
// There are three passes, each of which recomputes S and D, so that all sums stay in registers:
// nothing is accumulated in memory, results are bit for bit reproducible, and G is not stored.
// - dq: a block keeps queries and dO and iterates over tiles of keys and values.
// - dk and dv: it keeps keys and values and iterates over tiles of queries and dO.
// - the bias's gradient (attention_bias_gradient_sm90.cuh): it keeps a tile of the gradient and
//   iterates over the heads and batches that share it.
// Producer and consumers are those of the forward (attention_bias_sm90.cuh).
//
//   FX_FUSER_ATTENTION_BIAS_BACKWARD(/*shape*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                                    /*Out*/ __nv_bfloat16, /*q, k, v, bias*/ __nv_bfloat16)
#pragma once

#include "attention/attention_bias_gradient_sm90.cuh"
#include "attention/attention_bias_weights.cuh"

namespace fx_fuser::attention_bias {

template <int kShape>
struct QueriesPass {
  static constexpr BiasPass kIs = kBiasShapes[kShape].d_queries;
};
template <int kShape>
struct KeysPass {
  static constexpr BiasPass kIs = kBiasShapes[kShape].d_keys;
};

// ---- lse and delta of each query, ahead of the passes -------------------------------------------

// Half a warp per query, also for the padding beyond the last one. There, and for a query that sees
// no key, lse is infinite, so that weights are zero.
template <class T>
__device__ __forceinline__ void find_deltas(const BiasDeltaArgs& args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = 2 * (int64_t{blockIdx.x} * kBiasDeltaWarps + threadIdx.x / 32) + lane / 16;
  float sum = 0;
  const auto head = static_cast<int>(index / args.padded);
  const auto query = static_cast<int>(index - int64_t{head} * args.padded);
  const bool is_there = index < args.count && query < args.queries;
  if (is_there && 8 * (lane % 16) < args.d) {
    const int batch = head / args.heads;
    const auto load = [&](const BiasRows& rows) {
      const T* from = row_at<T>(rows, batch, head - batch * args.heads, query);
      return *reinterpret_cast<const uint4*>(from + 8 * (lane % 16));
    };
    const uint4 out = load(args.out);
    const uint4 d_out = load(args.d_out);
    const auto add = [&](uint32_t a, uint32_t b) {
      const float2 first = unpacked<T>(a);
      const float2 second = unpacked<T>(b);
      sum = fmaf(first.x, second.x, fmaf(first.y, second.y, sum));
    };
    add(out.x, d_out.x);
    add(out.y, d_out.y);
    add(out.z, d_out.z);
    add(out.w, d_out.w);
  }
#pragma unroll
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  if (lane % 16 != 0 || index >= args.count) return;
  float lse = minus_infinity();
  if (is_there) lse = args.lse[int64_t{head} * args.lse_rows + query] * kLog2OfE;
  args.of_queries[index] = {lse == minus_infinity() ? infinity() : lse, sum};
}

// ---- dq -----------------------------------------------------------------------------------------

template <class L>
__device__ __forceinline__ void feed_queries(const BiasAttentionArgs& args,
                                             typename L::Shared& shared) {
  Feed<L> feed{shared};
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < args.units;
       index += static_cast<int>(gridDim.x)) {
    const Unit unit = unit_at<false>(args, L::kColumns, index);
    const Bring bring{unit.head, unit.batch};
    feed.rows(bring, unit, args.q, args.d_out);
#pragma unroll 1
    for (int tile = 0; tile < unit.tiles; ++tile) {
      feed.tile(bring, args.k, tile);
      feed.tile(bring, args.v, tile);
      feed.bias(bring, args, unit, tile);
    }
  }
}

template <class L>
struct QueriesConsumer {
  using T = typename L::Element;
  using At = Ring<L::kSlots>;
  const BiasAttentionArgs& args;
  typename L::Shared& shared;
  At ring{};
  Ring<L::kBiases> biases{};
  uint32_t rows_phase = 0;

  // Turns a tile's S and D into G.
  __device__ __forceinline__ void weigh(const Unit& unit, int tile, const OfRows& rows,
                                        float (&score)[L::kScores], float (&other)[L::kScores]) {
    const int slot = biases.slot();
    wait_for(shared.bias_full[slot], biases.phase());
    const auto& bias = shared.bias[slot][Here::consumer()];
    const uint32_t seen = add_bias<T, false>(score, args.scale, bias);
    release_shared(shared.bias_empty[slot], seen);
    biases.advance();
    hide_keys<L::kColumns>(args, unit, tile, score);
    make_gradients<L>(args, shared, rows, score, other);
  }
  __device__ __forceinline__ void multiply(const At& of_keys, const At& of_values,
                                           float (&score)[L::kScores],
                                           float (&other)[L::kScores]) const {
    const int consumer = Here::consumer();
    issue_scores<T>(score, shared.rows[0][consumer], shared.tile[of_keys.slot()]);
    issue_scores<T>(other, shared.rows[1][consumer], shared.tile[of_values.slot()]);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ At next() {
    const At at = ring;
    ring.advance();
    return at;
  }

  __device__ __forceinline__ void run(const Unit& unit) {
    float score[L::kScores];
    float other[L::kScores];
    float d_query[L::kSums];
    uint32_t gradient[L::kSteps][4];
    const auto rows = OfRows::load(args, unit);

    wait_for(shared.rows_full[Here::consumer()], rows_phase);
    rows_phase ^= 1;
    At of_keys = next();
    At of_values = next();
    find_dropped<L>(args, shared, unit, 0);
    wait_for(shared.full[of_keys.slot()], of_keys.phase());
    wait_for(shared.full[of_values.slot()], of_values.phase());
    // Without pins ptxas moves code that computes these between the products and serialises them.
    ptx::pin(score);
    ptx::pin(other);
    Here::turns().take();
    ptx::wgmma_fence();
    multiply(of_keys, of_values, score, other);
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(score);
    ptx::pin(other);
    release(shared.empty[of_values.slot()]);
    if (unit.tiles == 1) release(shared.rows_empty[Here::consumer()]);
    weigh(unit, 0, rows, score, other);
    pack<T>(other, gradient);
#pragma unroll 1
    for (int tile = 1; tile < unit.tiles; ++tile) {
      const At before = of_keys;
      of_keys = next();
      of_values = next();
      find_dropped<L>(args, shared, unit, tile);
      wait_for(shared.full[of_keys.slot()], of_keys.phase());
      wait_for(shared.full[of_values.slot()], of_values.phase());
      ptx::pin(score);
      ptx::pin(other);
      ptx::pin(d_query);
      pin(gradient);
      Here::turns().take();
      ptx::wgmma_fence();
      multiply(of_keys, of_values, score, other);
      issue_results<T>(d_query, gradient, shared.tile[before.slot()], tile > 1);
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<1>();
      ptx::pin(score);
      ptx::pin(other);
      release(shared.empty[of_values.slot()]);
      if (tile == unit.tiles - 1) release(shared.rows_empty[Here::consumer()]);
      weigh(unit, tile, rows, score, other);
      ptx::wgmma_wait<0>();
      ptx::pin(d_query);
      pin(gradient);
      release(shared.empty[before.slot()]);
      pack<T>(other, gradient);
    }
    ptx::pin(d_query);
    pin(gradient);
    Here::turns().take();
    ptx::wgmma_fence();
    issue_results<T>(d_query, gradient, shared.tile[of_keys.slot()], unit.tiles > 1);
    ptx::wgmma_commit();
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(d_query);
    release(shared.empty[of_keys.slot()]);
    store_rows<T>(args, args.d_rows, unit, args.queries, d_query, args.scale);
  }
};

// ---- dk and dv ----------------------------------------------------------------------------------

template <class L>
__device__ __forceinline__ void feed_keys(const BiasAttentionArgs& args,
                                          typename L::Shared& shared) {
  Feed<L> feed{shared};
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < args.units;
       index += static_cast<int>(gridDim.x)) {
    const Unit unit = unit_at<true>(args, L::kColumns, index);
    const Bring bring{unit.head, unit.batch};
    feed.rows(bring, unit, args.k, args.v);
#pragma unroll 1
    for (int tile = unit.first_tile; tile < unit.tiles; ++tile) {
      feed.tile(bring, args.q, tile);
      feed.tile(bring, args.d_out, tile);
      feed.bias(bring, args, unit, tile);
    }
  }
}

template <class L>
struct KeysConsumer {
  using T = typename L::Element;
  using At = Ring<L::kSlots>;
  const BiasAttentionArgs& args;
  typename L::Shared& shared;
  At ring{};
  Ring<L::kBiases> biases{};
  uint32_t rows_phase = 0;

  // Turns a tile's S and D, transposed, into P and G.
  __device__ __forceinline__ void weigh(const Unit& unit, int tile, float (&score)[L::kScores],
                                        float (&other)[L::kScores]) {
    const int slot = biases.slot();
    wait_for(shared.bias_full[slot], biases.phase());
    add_bias<T, true>(score, args.scale, shared.bias[slot][Here::consumer()]);
    const Place place = Here::place();
    const int first_row = unit.first_row + Here::consumer() * kAttentionRows;
    const int first_query = tile * L::kColumns;
    if (args.is_causal && first_query < first_row + kAttentionRows) {
      int first[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) first[r] = place.row_of(unit, r) - first_query;
      hide_below(place, first, score);
    }
    make_both<L>(args, shared, place, shared.of_queries[slot], score, other);
    release_shared(shared.bias_empty[slot], __float_as_uint(other[L::kScores - 1]));
    biases.advance();
  }

  __device__ __forceinline__ void run(const Unit& unit) {
    float d_key[L::kSums];
    float d_value[L::kSums];
#pragma unroll
    for (int i = 0; i < L::kSums; ++i) d_key[i] = d_value[i] = 0;
    wait_for(shared.rows_full[Here::consumer()], rows_phase);
    rows_phase ^= 1;
#pragma unroll 1
    for (int tile = unit.first_tile; tile < unit.tiles; ++tile) {
      const At of_queries = ring;
      ring.advance();
      const At of_gradients = ring;
      ring.advance();
      float score[L::kScores];
      float other[L::kScores];
      find_dropped<L>(args, shared, unit, tile);
      wait_for(shared.full[of_queries.slot()], of_queries.phase());
      wait_for(shared.full[of_gradients.slot()], of_gradients.phase());
      ptx::pin(score);
      ptx::pin(other);
      Here::turns().take();
      ptx::wgmma_fence();
      issue_scores<T>(score, shared.rows[0][Here::consumer()], shared.tile[of_queries.slot()]);
      issue_scores<T>(other, shared.rows[1][Here::consumer()], shared.tile[of_gradients.slot()]);
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      ptx::pin(other);
      weigh(unit, tile, score, other);
      uint32_t weights[L::kSteps][4];
      uint32_t gradient[L::kSteps][4];
      pack<T>(score, weights);
      pack<T>(other, gradient);
      ptx::pin(d_key);
      ptx::pin(d_value);
      pin(weights);
      pin(gradient);
      Here::turns().take();
      ptx::wgmma_fence();
      issue_results<T>(d_value, weights, shared.tile[of_gradients.slot()], true);
      issue_results<T>(d_key, gradient, shared.tile[of_queries.slot()], true);
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<0>();
      ptx::pin(d_key);
      ptx::pin(d_value);
      release(shared.empty[of_queries.slot()]);
      release(shared.empty[of_gradients.slot()]);
    }
    release(shared.rows_empty[Here::consumer()]);
    const float of_kept = L::kDrops ? args.dropout.factor : 1;
    store_rows<T>(args, args.d_values, unit, args.keys, d_value, of_kept);
    store_rows<T>(args, args.d_rows, unit, args.keys, d_key, args.scale);
  }
};

// ---- the kernels --------------------------------------------------------------------------------

template <class L, class Consumer, bool kOfKeys>
__device__ __forceinline__ void run_pass(const BiasAttentionArgs& args) {
  run_block<L>(
      [&](typename L::Shared& shared) {
        if constexpr (kOfKeys) {
          feed_keys<L>(args, shared);
        } else {
          feed_queries<L>(args, shared);
        }
      },
      [&](typename L::Shared& shared) {
        Consumer consumer{args, shared};
#pragma unroll 1
        for (int index = static_cast<int>(blockIdx.x); index < args.units;
             index += static_cast<int>(gridDim.x)) {
          consumer.run(unit_at<kOfKeys>(args, L::kColumns, index));
        }
      });
}
template <class T, int kShape>
__device__ __forceinline__ void run_queries(const BiasAttentionArgs& args) {
  using L = Layout<T, QueriesPass<kShape>, false>;
  run_pass<L, QueriesConsumer<L>, false>(args);
}
template <class T, int kShape>
__device__ __forceinline__ void run_keys(const BiasAttentionArgs& args) {
  using L = Layout<T, KeysPass<kShape>, true>;
  run_pass<L, KeysConsumer<L>, true>(args);
}

}  // namespace fx_fuser::attention_bias

#define FX_FUSER_ATTENTION_BIAS_PASS(name, ...)                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kBiasThreads, 1) \
      name(const __grid_constant__ fx_fuser::BiasAttentionArgs args) {    \
    fx_fuser::attention_bias::__VA_ARGS__(args);                          \
  }
#define FX_FUSER_ATTENTION_BIAS_BACKWARD(shape, functor, scalars, Acc, Out, In)             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kBiasDeltaWarps * 32)              \
      fx_fuser_attention_bias_delta(const __grid_constant__ fx_fuser::BiasDeltaArgs args) { \
    fx_fuser::attention_bias::find_deltas<In>(args);                                        \
  }                                                                                         \
  FX_FUSER_ATTENTION_BIAS_PASS(fx_fuser_attention_bias_d_queries, run_queries<In, shape>)   \
  FX_FUSER_ATTENTION_BIAS_PASS(fx_fuser_attention_bias_d_keys, run_keys<In, shape>)         \
  FX_FUSER_ATTENTION_BIAS_PASS(fx_fuser_attention_bias_d_bias, run_gradient<In, shape>)
