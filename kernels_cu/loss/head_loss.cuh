// losses[i] = logsumexp(logits[i]) - logits[i][label], and in place the gradient of that by the
// logits, softmax(logits[i]) - one_hot(label), times a scale.
//
// A block takes a row. It reads the row once, for its largest logit and the sum of exp(logit -
// largest), each thread with a largest of its own that grows; and then again, mostly from L2, for
// the gradient. Every order is fixed by the row's length: results are the same bit for bit from run
// to run.
//
// Values are torch's: a NaN or +inf makes NaN of the row, and so do logits that are all -inf. Where
// the label does not count, the loss is 0 and the gradient 0 times softmax, of such a row NaN.
#pragma once

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "loss/head_loss_args.h"

namespace fx_fuser {

__device__ __forceinline__ float lowest() { return -INFINITY; }

// Of some logits: the largest, and the sum of exp(logit - largest), 0 where all are -inf.
struct ExpSum {
  float largest = lowest();
  float sum = 0.0f;

  // What is subtracted from logits: not -inf, of which each difference would be NaN.
  static __device__ __forceinline__ float shift_of(float largest) {
    return largest == lowest() ? 0.0f : largest;
  }

  template <int kCount>
  __device__ __forceinline__ void add(const float (&logit)[kCount]) {
    float now = largest;
#pragma unroll
    for (int i = 0; i < kCount; ++i) now = fmaxf(now, logit[i]);  // skips NaN, which the sum keeps
    const float shift = shift_of(now);
    sum *= math::exp_of_minus(shift - largest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += math::exp_of_minus(shift - logit[i]);
    largest = now;
  }

  __device__ __forceinline__ void merge(const ExpSum& other) {
    const float now = fmaxf(largest, other.largest);
    const float shift = shift_of(now);
    sum = sum * math::exp_of_minus(shift - largest) +
          other.sum * math::exp_of_minus(shift - other.largest);
    largest = now;
  }
};

// The same in all threads of the block.
__device__ __forceinline__ ExpSum merge_block(ExpSum mine) {
  __shared__ ExpSum of_warp[kHeadLossThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.merge(
        {__shfl_xor_sync(~0u, mine.largest, distance), __shfl_xor_sync(~0u, mine.sum, distance)});
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  ExpSum whole = of_warp[0];
  for (int warp = 1; warp < kHeadLossThreads / 32; ++warp) whole.merge(of_warp[warp]);
  return whole;
}

template <class T>
struct HeadLoss {
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kRound = kHeadLossThreads * kHeadLossInFlight;  // vectors
  using Vector = Packed<T, kWidth>;

  T* row;
  int columns;
  int vectors;  // of a row with what lies behind its columns

  __device__ __forceinline__ void load(Vector (&raw)[kHeadLossInFlight], int first) const {
#pragma unroll
    for (int i = 0; i < kHeadLossInFlight; ++i) {
      const int vector = first + i * kHeadLossThreads;
      if (vector < vectors) raw[i] = reinterpret_cast<const Vector*>(row)[vector];
    }
  }

  __device__ __forceinline__ ExpSum exp_sum() const {
    ExpSum mine;
    for (int first = threadIdx.x; first < vectors; first += kRound) {
      Vector raw[kHeadLossInFlight];
      load(raw, first);
      float logit[kHeadLossInFlight * kWidth];
#pragma unroll
      for (int i = 0; i < kHeadLossInFlight; ++i) {
        const int left = columns - (first + i * kHeadLossThreads) * kWidth;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          logit[i * kWidth + e] = e < left ? convert<float>(raw[i][e]) : lowest();
        }
      }
      mine.add(logit);
    }
    return merge_block(mine);
  }

  // Behind the columns 0. at_label: what the label's has less.
  __device__ __forceinline__ void store_gradient(const ExpSum& whole, float weight, int label,
                                                 float at_label) const {
    for (int first = threadIdx.x; first < vectors; first += kRound) {
      Vector raw[kHeadLossInFlight];
      load(raw, first);
#pragma unroll
      for (int i = 0; i < kHeadLossInFlight; ++i) {
        const int vector = first + i * kHeadLossThreads;
        const int left = columns - vector * kWidth;
        const int labelled = label - vector * kWidth;
        float gradient[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float logit = convert<float>(raw[i][e]);
          const float share = math::exp_of_minus(whole.largest - logit) * weight;
          const float value = e == labelled ? share - at_label : share;
          gradient[e] = e < left ? value : 0.0f;
        }
        if (vector < vectors) reinterpret_cast<Vector*>(row)[vector] = pack<T>(gradient);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void head_loss(const HeadLossArgs& args) {
  T* row = static_cast<T*>(args.logits) + int64_t{blockIdx.x} * args.pitch;
  const HeadLoss<T> of_row{row, args.columns, args.vectors};
  const int64_t given = args.labels[blockIdx.x];
  const bool counts = given != args.ignore_index;
  if (counts && (given < 0 || given >= args.columns)) __trap();
  const int label = counts ? static_cast<int>(given) : -1;
  // Before the block's barrier, behind which threads write gradients.
  const float picked = threadIdx.x == 0 && counts ? convert<float>(row[label]) : 0.0f;
  const ExpSum whole = of_row.exp_sum();
  if (threadIdx.x == 0) {
    // The difference first: of large logits it is exact.
    args.losses[blockIdx.x] = counts ? whole.largest - picked + logf(whole.sum) : 0.0f;
  }
  if (args.scale != nullptr) {
    const float scale = counts ? *args.scale : 0.0f;
    of_row.store_gradient(whole, scale / whole.sum, label, scale);
  }
}

}  // namespace fx_fuser

// One block an SM is all that is asked for: left to itself ptxas spills to make room for another.
#define FX_FUSER_HEAD_LOSS(functor, scalars, Acc, Out, T)                       \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kHeadLossThreads, 1)   \
      fx_fuser_head_loss(const __grid_constant__ fx_fuser::HeadLossArgs args) { \
    fx_fuser::head_loss<T>(args);                                               \
  }
