// Attention between its products: the softmax of rows of scores, in place, with the logarithm of
// its sum; the row sums that its backward needs; and the numbers of rows and keys, from which the
// epilogue of a product knows what a causal mask hides.
//
// A row stays in the registers of a warp or, where it is long, of a block; one longer yet is read
// three times. The order of every sum depends on the row's length alone.
#include <cmath>

#include "attention_args.h"

namespace fx_fuser {

struct Largest {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

template <class Combine>
__device__ __forceinline__ float in_warp(float value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}

// Those who share a row.
struct WarpTeam {
  static constexpr int kThreads = 32;

  static __device__ __forceinline__ uint32_t row() {
    return blockIdx.x * (kAttentionThreads / 32) + threadIdx.x / 32;
  }
  template <class Combine>
  static __device__ __forceinline__ float all(float value, Combine combine) {
    return in_warp(value, combine);
  }
};

struct BlockTeam {
  static constexpr int kThreads = kAttentionThreads;

  static __device__ __forceinline__ uint32_t row() { return blockIdx.x; }
  template <class Combine>
  static __device__ __forceinline__ float all(float value, Combine combine) {
    __shared__ float of_warp[kThreads / 32];
    value = in_warp(value, combine);
    __syncthreads();  // the values of before have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    float whole = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) whole = combine(whole, of_warp[warp]);
    return whole;
  }
};

struct Row {
  float* scores;
  uint32_t plane;
  int number;   // in its plane
  int visible;  // keys, the first ones
};

__device__ __forceinline__ Row row_at(const SoftmaxArgs& args, uint32_t index) {
  const uint32_t plane = divide(index, args.rows);
  const int number = args.first_row + static_cast<int>(index - plane * args.rows.size);
  const int visible = args.causal ? min(args.keys, number + 1) : args.keys;
  return {args.scores + index * args.pitch, plane, number, visible};
}

// Vectors end with a row's pitch; what lies behind its keys, or is hidden from it, counts as -inf.
__device__ __forceinline__ float4 scores_at(const Row& row, int key) {
  float4 found = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  if (key >= row.visible) return found;
  const float4 raw = *reinterpret_cast<const float4*>(row.scores + key);
  found.x = raw.x;
  if (key + 1 < row.visible) found.y = raw.y;
  if (key + 2 < row.visible) found.z = raw.z;
  if (key + 3 < row.visible) found.w = raw.w;
  return found;
}

__device__ __forceinline__ float largest_of(const float4& v) {
  return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
}
__device__ __forceinline__ float sum_of(const float4& v) { return (v.x + v.y) + (v.z + v.w); }
__device__ __forceinline__ float4 exp_of(const float4& v, float shift) {
  return make_float4(expf(v.x - shift), expf(v.y - shift), expf(v.z - shift), expf(v.w - shift));
}
__device__ __forceinline__ float4 product_of(const float4& v, float factor) {
  return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

// Of a row that sees nothing all is zero, as in PyTorch's kernel: nothing is subtracted, and its
// sum counts as 1.
__device__ __forceinline__ float shift_of(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

__device__ __forceinline__ void write_lse(const SoftmaxArgs& args, const Row& row, float shift,
                                          float sum) {
  if (args.lse == nullptr) return;
  float* lse = args.lse + row.plane * args.lse_pitch;
  lse[row.number] = shift + logf(sum);
  if (row.number != args.last_row) return;
  for (int64_t i = row.number + 1; i < args.lse_pitch; ++i) lse[i] = INFINITY;
}

template <class Team, int kVectors>
__device__ __forceinline__ void softmax(const SoftmaxArgs& args) {
  const uint32_t index = Team::row();
  if (index >= args.count) return;  // the same for the whole team
  const Row row = row_at(args, index);
  const int rank = threadIdx.x % Team::kThreads;
  const auto key_of = [&](int i) { return (i * Team::kThreads + rank) * kAttentionWidth; };

  float4 kept[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) kept[i] = scores_at(row, key_of(i));
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) largest = fmaxf(largest, largest_of(kept[i]));
  const float shift = shift_of(Team::all(largest, Largest{}));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    kept[i] = exp_of(kept[i], shift);
    sum += sum_of(kept[i]);
  }
  sum = Team::all(sum, Sum{});
  if (sum == 0) sum = 1;
  const float factor = 1 / sum;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (key_of(i) < args.keys) {
      *reinterpret_cast<float4*>(row.scores + key_of(i)) = product_of(kept[i], factor);
    }
  }
  if (rank == 0) write_lse(args, row, shift, sum);
}

__device__ __forceinline__ void softmax_long(const SoftmaxArgs& args) {
  const Row row = row_at(args, BlockTeam::row());
  constexpr int kStep = kAttentionThreads * kAttentionWidth;
  const int first = threadIdx.x * kAttentionWidth;
  float largest = -INFINITY;
  for (int key = first; key < row.visible; key += kStep) {
    largest = fmaxf(largest, largest_of(scores_at(row, key)));
  }
  const float shift = shift_of(BlockTeam::all(largest, Largest{}));
  float sum = 0;
  for (int key = first; key < row.visible; key += kStep) {
    sum += sum_of(exp_of(scores_at(row, key), shift));
  }
  sum = BlockTeam::all(sum, Sum{});
  if (sum == 0) sum = 1;
  const float factor = 1 / sum;
  for (int key = first; key < args.keys; key += kStep) {
    const float4 whole = product_of(exp_of(scores_at(row, key), shift), factor);
    *reinterpret_cast<float4*>(row.scores + key) = whole;
  }
  if (threadIdx.x == 0) write_lse(args, row, shift, sum);
}

// A warp a row.
__device__ __forceinline__ void row_dots(const RowDotsArgs& args) {
  const uint32_t index = WarpTeam::row();
  if (index >= args.count) return;
  const uint32_t plane = divide(index, args.rows);
  const uint32_t outer = divide(plane, args.inner);
  const auto start_of = [&](const RowDotsArgs::Operand& operand) {
    return operand.data + outer * operand.outer +
           (plane - outer * args.inner.size) * operand.inner +
           (index - plane * args.rows.size) * operand.row;
  };
  const float* a = start_of(args.a);
  const float* b = start_of(args.b);
  float sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32; i < args.columns; i += 32) {
    sum = fmaf(a[i * args.a.column], b[i * args.b.column], sum);
  }
  sum = in_warp(sum, Sum{});
  if (threadIdx.x % 32 == 0) args.dots[index] = sum;
}

__device__ __forceinline__ void count(const CountArgs& args) {
  const uint32_t i = blockIdx.x * kAttentionThreads + threadIdx.x;
  if (i < args.count) args.to[i] = static_cast<float>(i);
}

}  // namespace fx_fuser

#define FX_FUSER_ATTENTION_KERNEL(name, Args, ...)                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kAttentionThreads)    \
      fx_fuser_attention_##name(const __grid_constant__ fx_fuser::Args args) { \
    fx_fuser::__VA_ARGS__(args);                                               \
  }

FX_FUSER_ATTENTION_KERNEL(softmax_short, SoftmaxArgs, softmax<fx_fuser::WarpTeam, 2>)
FX_FUSER_ATTENTION_KERNEL(softmax_warp, SoftmaxArgs,
                          softmax<fx_fuser::WarpTeam, fx_fuser::kAttentionVectors>)
FX_FUSER_ATTENTION_KERNEL(softmax_block, SoftmaxArgs,
                          softmax<fx_fuser::BlockTeam, fx_fuser::kAttentionVectors>)
FX_FUSER_ATTENTION_KERNEL(softmax_long, SoftmaxArgs, softmax_long)
FX_FUSER_ATTENTION_KERNEL(row_dots, RowDotsArgs, row_dots)
FX_FUSER_ATTENTION_KERNEL(count, CountArgs, count)
