// Cross entropy of a head's logits: losses[i] = logsumexp(logits[i]) - logits[i][label], and its
// gradient by the logits, softmax(logits[i]) - one_hot(label), times a scale.
//
// One block per row. The first pass over the row finds the largest logit and the sum of exp(logit -
// largest), with a running maximum per thread (online softmax). The second pass computes the
// gradient: either at once, mostly from L2, in the logits' place (head_loss), or, if the logits are
// kept, in another launch (head_loss_gradient) that reads the two numbers which the first
// (head_loss_kept) left in `sums`. The order of all sums depends on the row's length only, so
// results are bit for bit the same from run to run.
//
// Kept logits have the layout that their Linear wrote. Rows of an odd length without padding are
// not aligned; they are read element by element, coalesced.
//
// FX_FUSER_HEAD_LOSS_TAIL instantiates the kernels with scaled or capped logits and a smoothed loss
// (`LogitTail`); the formulas above then hold for the scaled or capped values. The plain kernels
// contain no instruction for it.
//
// NaN as in torch: a NaN or +inf makes the row NaN, and so do logits that are all -inf. If the
// label is ignored, the loss is 0 and the gradient 0 times softmax, which is NaN for such a row.
#pragma once

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "loss/head_loss_args.h"

namespace fx_fuser {

__device__ __forceinline__ float lowest() { return -INFINITY; }

// For a set of logits: the largest, and the sum of exp(logit - largest), 0 if all are -inf.
struct ExpSum {
  float largest = lowest();
  float sum = 0.0f;

  // What is subtracted from logits: never -inf, since -inf - (-inf) is NaN.
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

// Softmax of the logits themselves.
struct NoTail {
  static constexpr bool kIsPlain = true;
  __device__ __forceinline__ explicit NoTail(const LogitTail&) {}
  static __device__ __forceinline__ float value(float logit) { return logit; }
};

struct WithTail {
  static constexpr bool kIsPlain = false;
  LogitTail given;
  __device__ __forceinline__ explicit WithTail(const LogitTail& tail) : given(tail) {}

  __device__ __forceinline__ float value(float logit) const {
    const float scaled = math::mul(logit, given.before);
    return given.after == 0.0f ? scaled : math::mul(given.after, math::tanh(scaled));
  }

  // The value, and its derivative by the logit.
  __device__ __forceinline__ float value(float logit, float& slope) const {
    const float scaled = math::mul(logit, given.before);
    slope = given.before;
    if (given.after == 0.0f) return scaled;
    const float capped = math::tanh(scaled);
    slope *= given.after * (1.0f - capped * capped);
    return math::mul(given.after, capped);
  }
};

// Merges over the block; all threads get the result.
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

// Sums over the block; all threads get the result.
__device__ __forceinline__ float sum_block(float mine) {
  __shared__ float of_warp[kHeadLossThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine += __shfl_xor_sync(~0u, mine, distance);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  float whole = of_warp[0];
  for (int warp = 1; warp < kHeadLossThreads / 32; ++warp) whole += of_warp[warp];
  return whole;
}

// A row of logits. kIsPadded: memory behind its last column may be read, up to a whole vector.
template <class T, int kWidth, bool kIsPadded, class Tail>
struct LogitRow {
  static constexpr int kInFlight = kHeadLossInFlight * (16 / sizeof(T)) / kWidth;  // vectors
  static constexpr int kRound = kHeadLossThreads * kInFlight;
  using Vector = Packed<T, kWidth>;

  const T* logits;
  int columns;
  Tail tail;

  __device__ __forceinline__ void load(Vector (&raw)[kInFlight], int first) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int begin = (first + i * kHeadLossThreads) * kWidth;
      if (begin + (kIsPadded ? 1 : kWidth) <= columns) {
        raw[i] = *reinterpret_cast<const Vector*>(logits + begin);
      } else if (kWidth > 1 && !kIsPadded) {
        raw[i].assign([&](int e) { return begin + e < columns ? logits[begin + e] : T{}; });
      }
    }
  }

  // The ExpSum of the row's values. With a tail, `total` becomes the sum of the values.
  __device__ __forceinline__ ExpSum exp_sum(float& total) const {
    ExpSum mine;
    total = 0.0f;
    for (int first = threadIdx.x; first * kWidth < columns; first += kRound) {
      Vector raw[kInFlight];
      load(raw, first);
      float logit[kInFlight * kWidth];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int left = columns - (first + i * kHeadLossThreads) * kWidth;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float value = tail.value(convert<float>(raw[i][e]));
          logit[i * kWidth + e] = e < left ? value : lowest();
          if (!Tail::kIsPlain) total += e < left ? value : 0.0f;
        }
      }
      mine.add(logit);
    }
    if (!Tail::kIsPlain) total = sum_block(total);
    return merge_block(mine);
  }

  // Writes the gradient to `pitch` elements at `to`, which may be the row itself: scale * softmax,
  // plus hot * flat in every column, plus hot at the label (-1: none). Zeros behind the columns.
  __device__ __forceinline__ void store_gradient(T* to, int pitch, const ExpSum& whole, float scale,
                                                 float hot, float flat, int label) const {
    const float weight = scale / whole.sum;
    const float everywhere = hot * flat;
    for (int first = threadIdx.x; first * kWidth < pitch; first += kRound) {
      Vector raw[kInFlight];
      load(raw, first);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int begin = (first + i * kHeadLossThreads) * kWidth;
        float gradient[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float logit = convert<float>(raw[i][e]);
          float slope = 1.0f, value = logit;
          if constexpr (!Tail::kIsPlain) value = tail.value(logit, slope);
          float share = math::exp_of_minus(whole.largest - value) * weight;
          if (!Tail::kIsPlain) share += everywhere;
          const float made = begin + e == label ? share + hot : share;
          gradient[e] = begin + e < columns ? made * slope : 0.0f;
        }
        if (begin < pitch) *reinterpret_cast<Vector*>(to + begin) = pack<T>(gradient);
      }
    }
  }
};

// The row's label, -1 if it is ignored.
__device__ __forceinline__ int label_of(const HeadLossArgs& args) {
  const int64_t given = args.labels[blockIdx.x];
  if (given == args.ignore_index) return -1;
  if (given < 0 || given >= args.columns) __trap();
  return static_cast<int>(given);
}

template <class T, int kWidth, bool kIsPadded, class Tail>
__device__ __forceinline__ ExpSum store_loss(const HeadLossArgs& args,
                                             const LogitRow<T, kWidth, kIsPadded, Tail>& row,
                                             int label) {
  // Read before the block's barrier: after it, threads may overwrite the logits with gradients.
  const bool picks = threadIdx.x == 0 && label >= 0;
  const float picked = picks ? row.tail.value(convert<float>(row.logits[label])) : 0.0f;
  float total;
  const ExpSum whole = row.exp_sum(total);
  if (threadIdx.x == 0) {
    // The difference first: it is exact for large logits.
    float behind = whole.largest - picked;
    if (!Tail::kIsPlain && args.tail.smoothing != 0.0f) {
      const float mean = total / static_cast<float>(args.columns);
      behind += args.tail.smoothing * (picked - mean);
    }
    args.losses[blockIdx.x] = label >= 0 ? behind + logf(whole.sum) : 0.0f;
  }
  return whole;
}

// Label smoothing: each column's share of the label's gradient, relative to `hot_of`.
template <class Tail>
__device__ __forceinline__ float flat_of(const HeadLossArgs& args) {
  if (Tail::kIsPlain) return 0.0f;
  const float smoothing = args.tail.smoothing;
  return smoothing / ((1.0f - smoothing) * static_cast<float>(args.columns));
}

// The label's gradient without softmax's part.
template <class Tail>
__device__ __forceinline__ float hot_of(const HeadLossArgs& args, float of_loss) {
  return Tail::kIsPlain ? of_loss : of_loss * (1.0f - args.tail.smoothing);
}

template <class T, class Tail>
__device__ __forceinline__ void head_loss(const HeadLossArgs& args) {
  T* logits = static_cast<T*>(args.gradient) + int64_t{blockIdx.x} * args.gradient_pitch;
  const LogitRow<T, 16 / sizeof(T), true, Tail> row{logits, args.columns, Tail(args.tail)};
  const int label = label_of(args);
  const ExpSum whole = store_loss(args, row, label);
  if (args.scale != nullptr) {
    const float scale = label >= 0 ? *args.scale : 0.0f;
    row.store_gradient(logits, args.gradient_pitch, whole, scale, hot_of<Tail>(args, -scale),
                       flat_of<Tail>(args), label);
  }
}

template <class T, int kWidth, class Tail>
__device__ __forceinline__ LogitRow<T, kWidth, false, Tail> kept_row(const HeadLossArgs& args) {
  return {static_cast<const T*>(args.logits) + int64_t{blockIdx.x} * args.pitch, args.columns,
          Tail(args.tail)};
}

template <class T, int kWidth, class Tail>
__device__ __forceinline__ void head_loss_kept(const HeadLossArgs& args) {
  const ExpSum whole = store_loss(args, kept_row<T, kWidth, Tail>(args), label_of(args));
  if (threadIdx.x == 0) args.sums[blockIdx.x] = {whole.largest, whole.sum};
}

template <class T, int kWidth, class Tail>
__device__ __forceinline__ void head_loss_gradient(const HeadLossArgs& args) {
  T* gradient = static_cast<T*>(args.gradient) + int64_t{blockIdx.x} * args.gradient_pitch;
  const int label = label_of(args);
  const RowSums sums = args.sums[blockIdx.x];
  const float scale = args.scale[blockIdx.x];
  const float hot = args.hot[blockIdx.x];
  kept_row<T, kWidth, Tail>(args).store_gradient(
      gradient, args.gradient_pitch, {sums.largest, sums.sum}, scale, hot_of<Tail>(args, hot),
      flat_of<Tail>(args), label);
}

}  // namespace fx_fuser

// A minimum of one block per SM: without it ptxas spills to make room for a second one.
#define FX_FUSER_HEAD_LOSS_KERNEL(name, ...)                                  \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kHeadLossThreads, 1) \
      name(const __grid_constant__ fx_fuser::HeadLossArgs args) {             \
    fx_fuser::__VA_ARGS__(args);                                              \
  }

#define FX_FUSER_HEAD_LOSS_KERNELS(T, Tail)                                        \
  FX_FUSER_HEAD_LOSS_KERNEL(fx_fuser_head_loss, head_loss<T, fx_fuser::Tail>)      \
  FX_FUSER_HEAD_LOSS_KERNEL(fx_fuser_head_loss_kept,                               \
                            head_loss_kept<T, 16 / sizeof(T), fx_fuser::Tail>)     \
  FX_FUSER_HEAD_LOSS_KERNEL(fx_fuser_head_loss_kept_unaligned,                     \
                            head_loss_kept<T, 1, fx_fuser::Tail>)                  \
  FX_FUSER_HEAD_LOSS_KERNEL(fx_fuser_head_loss_gradient,                           \
                            head_loss_gradient<T, 16 / sizeof(T), fx_fuser::Tail>) \
  FX_FUSER_HEAD_LOSS_KERNEL(fx_fuser_head_loss_gradient_unaligned,                 \
                            head_loss_gradient<T, 1, fx_fuser::Tail>)

#define FX_FUSER_HEAD_LOSS(functor, scalars, Acc, Out, T) FX_FUSER_HEAD_LOSS_KERNELS(T, NoTail)
#define FX_FUSER_HEAD_LOSS_TAIL(functor, scalars, Acc, Out, T) \
  FX_FUSER_HEAD_LOSS_KERNELS(T, WithTail)
