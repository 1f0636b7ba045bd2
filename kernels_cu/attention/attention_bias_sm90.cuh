// out = softmax(scale · q kᵀ + bias) v with 16-bit operands, for sm_90a.
//
// Sums are fp32, and the weights of the second product are 16 bits, as in torch's kernels. Blocks
// are persistent. One producer thread loads queries and tiles of keys, values and the bias by TMA;
// two consumer warpgroups of 64 queries each take turns at the tensor core. A turn is the scores of
// one tile and p v of the previous one; the other warpgroup's softmax overlaps it. Dropout, if the
// shape has it, is that of attention_dropout.cuh. NOTES.md has the arithmetic.
//
//   FX_FUSER_ATTENTION_BIAS(/*shape*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                           /*Out*/ __nv_bfloat16, /*q, k, v, bias*/ __nv_bfloat16)
#pragma once

#include "attention/attention_bias_tiles_sm90.cuh"

namespace fx_fuser::attention_bias {

using attention_split::largest_of_row;
using attention_split::sum_of_row;

template <int kShape>
struct ForwardPass {
  static constexpr BiasPass kIs = kBiasShapes[kShape].forward;
};

// The producer: loads keys, values and biases in the consumers' order.
template <class L>
__device__ __forceinline__ void feed_forward(const BiasAttentionArgs& args,
                                             typename L::Shared& shared) {
  Feed<L> feed{shared};
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < args.units;
       index += static_cast<int>(gridDim.x)) {
    const Unit unit = unit_at<false>(args, L::kColumns, index);
    const Bring bring{unit.head, unit.batch};
    feed.rows(bring, unit, args.q, args.q);
#pragma unroll 1
    for (int tile = 0; tile < unit.tiles; ++tile) {
      feed.tile(bring, args.k, tile);
      if (tile > 0) feed.tile(bring, args.v, tile - 1);
      feed.bias(bring, args, unit, tile);
    }
    feed.tile(bring, args.v, unit.tiles - 1);
  }
}

// If all logits are below this, all keys are hidden, as by -inf: a mask may be bf16's most negative
// number, whose product with log2(e) overflows, and whose rounding error exceeds any exponent.
constexpr float kFarthest = -1048576.0f;

// Online softmax: the state of a thread's two rows from tile to tile.
struct RowState {
  float largest[2];  // logit
  float sum[2];      // over this thread's columns

  // Turns logits into exp(logit - largest so far). rescale: the factor of earlier results.
  template <int kScores>
  __device__ __forceinline__ void take(float (&score)[kScores], float (&rescale)[2]) {
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = score[2 * r];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        high = fmaxf(high, fmaxf(score[i + 2 * r], score[i + 2 * r + 1]));
      }
      const float before = largest[r];
      largest[r] = fmaxf(before, largest_of_row(high));
      // If all keys so far are hidden, weights are 0.
      const float shift = fmaxf(largest[r], kFarthest);
      offset[r] = shift * kLog2OfE;
      rescale[r] = ptx::exp2((before - shift) * kLog2OfE);  // 1 if the largest is unchanged
    }
    float of_tile[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      score[i] = ptx::exp2(fmaf(score[i], kLog2OfE, -offset[i / 2 % 2]));
      of_tile[i / 2 % 2] += score[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], rescale[r], of_tile[r]);
  }
};

template <class L>
struct Consumer {
  using T = typename L::Element;
  const BiasAttentionArgs& args;
  typename L::Shared& shared;
  Ring<L::kSlots> ring{};
  Ring<L::kBiases> biases{};
  uint32_t rows_phase = 0;

  __device__ __forceinline__ void release_rows() { release(shared.rows_empty[Here::consumer()]); }

  // Turns a tile's scores into weights: bias, mask, softmax, dropout.
  __device__ __forceinline__ void soften(const Unit& unit, int tile, float (&score)[L::kScores],
                                         RowState& state, float (&rescale)[2]) {
    const int slot = biases.slot();
    wait_for(shared.bias_full[slot], biases.phase());
    const auto& bias = shared.bias[slot][Here::consumer()];
    const uint32_t seen = add_bias<T, false>(score, args.scale, bias);
    release_shared(shared.bias_empty[slot], seen);
    biases.advance();
    hide_keys<L::kColumns>(args, unit, tile, score);
    state.take(score, rescale);
    if constexpr (L::kDrops) {
      Drops<L> drops{shared};
#pragma unroll
      for (int i = 0; i < L::kScores; ++i) {
        if (drops.at(i)) score[i] = 0;
      }
    }
  }

  __device__ __forceinline__ void run(const Unit& unit) {
    const auto& queries = shared.rows[0][Here::consumer()];
    float score[L::kScores];
    float result[L::kSums];
    uint32_t weights[L::kSteps][4];
    RowState state{{minus_infinity(), minus_infinity()}, {0, 0}};
    float rescale[2];

    wait_for(shared.rows_full[Here::consumer()], rows_phase);
    rows_phase ^= 1;
    find_dropped<L>(args, shared, unit, 0);
    wait_for(shared.full[ring.slot()], ring.phase());
    // Without pins ptxas moves code that computes these between the products and serialises them.
    ptx::pin(score);
    Here::turns().take();
    ptx::wgmma_fence();
    issue_scores<T>(score, queries, shared.tile[ring.slot()]);
    ptx::wgmma_commit();
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(score);
    release(shared.empty[ring.slot()]);
    ring.advance();
    if (unit.tiles == 1) release_rows();
    soften(unit, 0, score, state, rescale);
    pack<T>(score, weights);
#pragma unroll 1
    for (int tile = 1; tile < unit.tiles; ++tile) {
      const Ring<L::kSlots> of_keys = ring;
      ring.advance();
      find_dropped<L>(args, shared, unit, tile);
      wait_for(shared.full[of_keys.slot()], of_keys.phase());
      wait_for(shared.full[ring.slot()], ring.phase());
      ptx::pin(score);
      ptx::pin(result);
      pin(weights);
      Here::turns().take();
      ptx::wgmma_fence();
      issue_scores<T>(score, queries, shared.tile[of_keys.slot()]);
      ptx::wgmma_commit();
      issue_results<T>(result, weights, shared.tile[ring.slot()], tile > 1);
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<1>();
      ptx::pin(score);
      release(shared.empty[of_keys.slot()]);
      if (tile == unit.tiles - 1) release_rows();
      soften(unit, tile, score, state, rescale);
      ptx::wgmma_wait<0>();
      ptx::pin(result);
      pin(weights);
      release(shared.empty[ring.slot()]);
      ring.advance();
#pragma unroll
      for (int i = 0; i < L::kSums; ++i) result[i] *= rescale[i / 2 % 2];
      pack<T>(score, weights);
    }
    wait_for(shared.full[ring.slot()], ring.phase());
    ptx::pin(result);
    pin(weights);
    Here::turns().take();
    ptx::wgmma_fence();
    issue_results<T>(result, weights, shared.tile[ring.slot()], unit.tiles > 1);
    ptx::wgmma_commit();
    Here::turns().pass();
    ptx::wgmma_wait<0>();
    ptx::pin(result);
    release(shared.empty[ring.slot()]);
    ring.advance();
    store(unit, state, result);
  }

  __device__ __forceinline__ void store(const Unit& unit, const RowState& state,
                                        const float (&result)[L::kSums]) const {
    const Place place = Here::place();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(state.sum[r]);
      const int query = place.row_of(unit, r);
      const bool is_there = query < args.queries;
      if (is_there) {  // with no visible key the result is 0, as torch's
        T* to = row_at<T>(args.out, unit.batch, unit.head, query);
        const float of_kept = L::kDrops ? args.dropout.factor : 1;
        store_row(to, args.d, place, r, result, sum == 0 ? 0 : of_kept / sum);
      }
      if (args.lse != nullptr && place.c == 0 && query < args.lse_rows) {
        args.lse[head_of(args, unit) * args.lse_rows + query] =
            is_there ? state.largest[r] + log2f(sum) * kLn2 : infinity();
      }
    }
  }
};

template <class T, int kShape>
__device__ __forceinline__ void run_forward(const BiasAttentionArgs& args) {
  using L = Layout<T, ForwardPass<kShape>, false>;
  run_block<L>([&](typename L::Shared& shared) { feed_forward<L>(args, shared); },
               [&](typename L::Shared& shared) {
                 Consumer<L> consumer{args, shared};
#pragma unroll 1
                 for (int index = static_cast<int>(blockIdx.x); index < args.units;
                      index += static_cast<int>(gridDim.x)) {
                   consumer.run(unit_at<false>(args, L::kColumns, index));
                 }
               });
}

}  // namespace fx_fuser::attention_bias

#define FX_FUSER_ATTENTION_BIAS(shape, functor, scalars, Acc, Out, In)                    \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kBiasThreads, 1)                 \
      fx_fuser_attention_bias(const __grid_constant__ fx_fuser::BiasAttentionArgs args) { \
    fx_fuser::attention_bias::run_forward<In, shape>(args);                               \
  }
