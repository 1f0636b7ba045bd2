// losses[i] = logsumexp(logits[i]) - logits[i][label], and the gradient of that by the logits,
// softmax(logits[i]) - one_hot(label), times a scale.
//
// A block takes a row. It reads the row once, for its largest logit and the sum of exp(logit -
// largest), each thread with a largest of its own that grows; and then again for the gradient: at
// once, mostly from L2, in the logits' place, or where the logits stay in another launch, to which
// the first leaves the two numbers. Every order is fixed by the row's length: results are the same
// bit for bit from run to run.
//
// Logits that stay lie as their Linear wrote them: rows of an odd length without padding begin
// anywhere, and are read element by element, of which a warp's lie side by side.
//
// By FX_FUSER_HEAD_LOSS_TAIL softmax takes values that are scaled or capped logits, and the loss
// may be smoothed (`LogitTail`); what is above then holds for these. The others have no instruction
// for it.
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

// Softmax takes the logits themselves.
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

  // The value, which by the logit has this slope.
  __device__ __forceinline__ float value(float logit, float& slope) const {
    const float scaled = math::mul(logit, given.before);
    slope = given.before;
    if (given.after == 0.0f) return scaled;
    const float capped = math::tanh(scaled);
    slope *= given.after * (1.0f - capped * capped);
    return math::mul(given.after, capped);
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

// In all threads of the block.
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

// A row of logits. kIsPadded: may what lies behind its columns be read, up to a whole vector?
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

  // Of the row's values. total: becomes their sum, where there is a tail.
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

  // To `pitch` elements, which may be the row itself; behind the columns 0: scale times softmax,
  // and at the label, -1 for none, hot more. flat: of hot, more at each column.
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

// The row's label, -1 where it does not count.
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
  // Before the block's barrier, behind which threads may write gradients in the logits' place.
  const bool picks = threadIdx.x == 0 && label >= 0;
  const float picked = picks ? row.tail.value(convert<float>(row.logits[label])) : 0.0f;
  float total;
  const ExpSum whole = row.exp_sum(total);
  if (threadIdx.x == 0) {
    // The difference first: of large logits it is exact.
    float behind = whole.largest - picked;
    if (!Tail::kIsPlain && args.tail.smoothing != 0.0f) {
      const float mean = total / static_cast<float>(args.columns);
      behind += args.tail.smoothing * (picked - mean);
    }
    args.losses[blockIdx.x] = label >= 0 ? behind + logf(whole.sum) : 0.0f;
  }
  return whole;
}

// What each column's gradient has of the label's.
template <class Tail>
__device__ __forceinline__ float flat_of(const HeadLossArgs& args) {
  if (Tail::kIsPlain) return 0.0f;
  const float smoothing = args.tail.smoothing;
  return smoothing / ((1.0f - smoothing) * static_cast<float>(args.columns));
}

// The label's gradient beside softmax's.
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

// One block an SM is all that is asked for: left to itself ptxas spills to make room for another.
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
