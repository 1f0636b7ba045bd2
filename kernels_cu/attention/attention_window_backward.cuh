// dq, dk, dv and the gradient of the bias of attention_window.cuh.
//
//   S = scale · q kᵀ + bias   P = softmax(S)   D = dO vᵀ   G = P ∘ (D - sum over keys of P ∘ D)
//   dv = Pᵀ dO   dq = scale · G k   dk = scale · Gᵀ q   dbias = sum of G where batches share it
//
// One pass: a warp has all keys of its queries, so nothing of the forward is read but its operands.
// P and G go through shared memory in 16 bits to the warps of keys. The bias's gradient stays in
// registers while batches pass; a second kernel adds the sums of all blocks in a fixed order.
//
//   FX_FUSER_ATTENTION_WINDOW_BACKWARD(/*shape*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                                      /*Out*/ __nv_bfloat16, /*q, k, v*/ __nv_bfloat16)
#pragma once

#include "attention/attention_window.cuh"

namespace fx_fuser::attention_window {

// weights = softmax, other = its gradient's product with it, of weights' and other's S and D.
__device__ __forceinline__ void make_gradients(Sums<kWindowRows>& weights, Sums<kWindowRows>& other,
                                               const WindowArgs& args, const OwnBias& bias) {
  float sum[2];
  soften(weights, args, bias, sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = 1 / sum[r];
    float delta = 0;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float& weight = weights[i / 2][2 * r + i % 2];
      weight *= factor;
      delta = fmaf(weight, other[i / 2][2 * r + i % 2], delta);
    }
    delta = sum_of_row(delta);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float& gradient = other[i / 2][2 * r + i % 2];
      gradient = weights[i / 2][2 * r + i % 2] * (gradient - delta);
    }
  }
}

template <class T>
__device__ __forceinline__ void put_scores(uint32_t to, const Sums<kWindowRows>& score,
                                           const Lane& at) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float* two = &score[block][2 * r];
      ptx::store_shared_word(at.of_sums<kScoresD>(to, r, block), packed<T>(two[0], two[1]));
    }
  }
}

// sum = scoreᵀ · tile, of the 16 keys that are the warp's.
template <class T, int kD>
__device__ __forceinline__ void multiply_transposed(Sums<kD>& sum, uint32_t score, uint32_t tile,
                                                    const Lane& at) {
#pragma unroll
  for (auto& block : sum) block[0] = block[1] = block[2] = block[3] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[4];
    ptx::load_transposed(a, at.by_chunks<kScoresD>(score, 16 * step, 2 * at.warp));
    add_product<T, kD>(sum, a, tile, 16 * step, at);
  }
}

__device__ __forceinline__ void store_bias_gradient(const WindowArgs& args,
                                                    const Sums<kWindowRows>& sum, const Lane& at) {
  const int64_t of_block = int64_t{blockIdx.x} * args.queries * args.keys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = at.row(r);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int key = 8 * (i / 2) + 2 * at.l + i % 2;
      if (query < args.queries && key < args.keys) {
        args.d_bias[of_block + query * args.keys + key] = sum[i / 2][2 * r + i % 2];
      }
    }
  }
}

template <class T, int kShape>
__device__ __forceinline__ void run_backward(const WindowArgs& args) {
  constexpr int kD = Shape<kShape>::kD;
  constexpr int kTile = Shape<kShape>::kTile;
  constexpr int kStage = 4 * kTile;
  constexpr int kMatrix = kWindowScores * 2;
  extern __shared__ __align__(1024) uint8_t storage[];
  const Part part(args);
  const uint32_t weights_at = ptx::shared_address(storage) + kWindowStages * kStage;
  const uint32_t gradients_at = weights_at + kMatrix;
  const OwnBias bias(storage + kWindowStages * kStage + 2 * kMatrix);
  Sums<kWindowRows> d_bias = {};
  for_batches(
      args, part, bias, ptx::shared_address(storage), kStage,
      [&](uint32_t to, int batch) {
        copy_tile<T, kD>(to, args.q, batch, part.head, args.queries, args.d);
        copy_tile<T, kD>(to + kTile, args.k, batch, part.head, args.keys, args.d);
        copy_tile<T, kD>(to + 2 * kTile, args.v, batch, part.head, args.keys, args.d);
        copy_tile<T, kD>(to + 3 * kTile, args.d_out, batch, part.head, args.queries, args.d);
      },
      [&](uint32_t q, int batch) {
        const Lane at;
        const uint32_t k = q + kTile;
        const uint32_t v = q + 2 * kTile;
        const uint32_t d_out = q + 3 * kTile;
        Sums<kD> d_query;
        {
          Sums<kWindowRows> weights;
          Sums<kWindowRows> gradients;
          multiply_rows<T, kD>(weights, q, k, at);
          multiply_rows<T, kD>(gradients, d_out, v, at);
          make_gradients(weights, gradients, args, bias);
          put_scores<T>(weights_at, weights, at);
          put_scores<T>(gradients_at, gradients, at);
#pragma unroll
          for (int i = 0; i < 4 * kBlocks; ++i) d_bias[i / 4][i % 4] += gradients[i / 4][i % 4];
          multiply_scores<T, kD>(d_query, gradients, k, at);
        }
        __syncthreads();  // of all queries P and G are there
        Sums<kD> d_key;
        Sums<kD> d_value;
        multiply_transposed<T, kD>(d_value, weights_at, d_out, at);
        multiply_transposed<T, kD>(d_key, gradients_at, q, at);
        __syncthreads();  // the tiles are read no more
        const float scale[2] = {args.scale, args.scale};
        const float one[2] = {1, 1};
        const auto store = [&](const BiasRows& to, int rows, const Sums<kD>& sum,
                               const float (&factor)[2], uint32_t tile) {
          store_rows<T, kD>(to, batch, part.head, rows, args.d, sum, factor, tile, at);
        };
        store(args.out, args.queries, d_query, scale, q);
        store(args.d_k, args.keys, d_key, scale, k);
        store(args.d_v, args.keys, d_value, one, v);
      });
  if (args.d_bias != nullptr) store_bias_gradient(args, d_bias, Lane());
}

// to = the sum over chunks, in a fixed order.
__device__ __forceinline__ void add_chunks(const WindowSumArgs& args) {
  __shared__ float part[kWindowSumRows][kWindowSumColumns];
  const int column = static_cast<int>(threadIdx.x) % kWindowSumColumns;
  const int row = static_cast<int>(threadIdx.x) / kWindowSumColumns;
  const int64_t element = int64_t{blockIdx.x} * kWindowSumColumns + column;
  float sum = 0;
  if (element < args.count) {
#pragma unroll 4
    for (int chunk = row; chunk < args.chunks; chunk += kWindowSumRows) {
      sum += args.from[chunk * args.count + element];
    }
  }
  part[row][column] = sum;
  __syncthreads();
  if (row != 0 || element >= args.count) return;
  for (int i = 1; i < kWindowSumRows; ++i) sum += part[i][column];
  args.to[element] = sum;
}

}  // namespace fx_fuser::attention_window

#define FX_FUSER_ATTENTION_WINDOW_BACKWARD(shape, functor, scalars, Acc, Out, In)                \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kWindowThreads,                         \
                                               fx_fuser::kWindowShapes[shape].backward_resident) \
      fx_fuser_attention_window_backward(const __grid_constant__ fx_fuser::WindowArgs args) {    \
    fx_fuser::attention_window::run_backward<In, shape>(args);                                   \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(                                                  \
      fx_fuser::kWindowSumColumns* fx_fuser::kWindowSumRows)                                     \
      fx_fuser_attention_window_sum(const __grid_constant__ fx_fuser::WindowSumArgs args) {      \
    fx_fuser::attention_window::add_chunks(args);                                                \
  }
