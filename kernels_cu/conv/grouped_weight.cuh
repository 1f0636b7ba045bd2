// dw[o, i, tap] = sum over the result's pixels of dz[pixel, o] x[pixel's tap, i]: the gradient of
// grouped.cuh's weight, of bf16 or fp16 in channels_last, by `mma.sync`, for sm_80 and later.
//
// Patches of x are those of grouped.cuh, beside them lies the tile's dz. Pixels are a product's k:
// its rows are two vectors of input channels, of a tap or of two, its columns 8 output channels.
// `ldmatrix` transposes both. A warp keeps the sums of its role over all tiles of its block. Then
// it writes them, and a second kernel adds up those of all blocks, in a fixed order, so that the
// same bits come out of each run.
//
//   FX_FUSER_GROUPED_WEIGHT(/*tiles*/ 3, /*is_mixed*/ 0, functor, /*scalars*/ 0, /*Acc*/ float,
//   /*Out*/ __half,
//                           /*x, dz*/ __half)
//
// A pixel of dz that does not exist counts as 0, times what the tile's first pixel reads: an
// infinity there, whose gradient is not finite anyway, may make NaN.
#pragma once

#include "conv/grouped_store.cuh"

namespace fx_fuser::grouped_weight {

using grouped::Corner;
using grouped::is_within;
using grouped::Place;
using grouped::Slice;

template <class X_, int kTilesOf, bool kIsMixed>
struct Shape {
  using X = X_;
  static constexpr int kTiles = kTilesOf;
  static constexpr bool kMixed = kIsMixed;
  static constexpr int kPairs = (kTiles + 1) / 2;
  static constexpr int kSteps = grouped_weight_steps(kTiles, kMixed);
  static constexpr int kAtOnce = kTiles > 3 ? 1 : 4;  // copies; more would spill beside the sums
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
};

template <class S>
using Sums = float[S::kSteps][S::kTiles][4];

// Where the first tap of a tile's pixels is in its patch, in bytes.
__device__ __forceinline__ int32_t* pixels_of(const GroupedWeightArgs& args, uint8_t* storage,
                                              int buffer) {
  const int count = args.batches * kGroupedRows * kGroupedRow;
  return reinterpret_cast<int32_t*>(storage + args.pixels_at) + buffer * count;
}

// Copies a tile's dz, zeros where there is no pixel, and notes where each pixel's first tap is in
// the patch. Visible after ptx::copy_async_wait() and a barrier.
template <int kAtOnce>
__device__ __forceinline__ void feed_gradient(const GroupedWeightArgs& args, uint8_t* storage,
                                              int tile, int buffer) {
  const uint32_t to = ptx::shared_address(storage) + args.dz_at + buffer * args.dz_bytes;
  int32_t* pixels = pixels_of(args, storage, buffer);
  const Corner corner = Corner::of(args, tile);
  const Slice slice = Slice::self(args);
  const int first = slice.unit * args.unit_tiles + slice.tile;
  const int behind = args.outputs / 8 - first;
  const uint32_t limit = corner.limit(args);
  const int origin = corner.image * args.dz_stride[0] + corner.row * args.dz_stride[1] +
                     corner.column * args.dz_stride[2] + first;
  const auto* place = reinterpret_cast<const Place*>(storage + args.places_at);
  const auto* first_tap = reinterpret_cast<const int32_t*>(storage + args.first_taps_at);
  const int count =
      args.batches * kGroupedRows * kGroupedRow * static_cast<int>(args.dz_vectors.size);
  const auto* dz = static_cast<const uint4*>(args.dz);
#pragma unroll kAtOnce
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kGroupedThreads) {
    const auto pixel = static_cast<int>(divide(static_cast<uint32_t>(i), args.dz_vectors));
    const int vector = i - pixel * static_cast<int>(args.dz_vectors.size);
    const Place at = place[pixel];
    const bool exists = is_within(at.position, limit);
    if (vector == 0) pixels[pixel] = exists ? first_tap[pixel] : 0;
    const bool reads = exists && vector < behind;
    ptx::copy_async_16(to + pixel * args.dz_pitch + vector * 16,
                       dz + (reads ? origin + at.to + vector : 0), reads ? 16 : 0);
  }
}

// A warp's part of the sums.
struct Role {
  int unit;   // of the slice
  int step;   // the first pair of vectors of k
  int share;  // of the pixels

  static __device__ __forceinline__ Role self(const GroupedWeightArgs& args, int steps) {
    const auto warp = static_cast<int>(ptx::thread_index()) / 32;
    const int role = warp % args.roles;
    return {role / args.roles_of_unit, role % args.roles_of_unit * steps, warp / args.roles};
  }
};

// Adds the products of a tile's pixels that are the warp's share.
template <class S>
__device__ __forceinline__ void multiply(const GroupedWeightArgs& args, uint8_t* storage,
                                         int buffer, const Role& role, Sums<S>& sum) {
  using X = typename S::X;
  const auto lane = static_cast<int>(ptx::thread_index() % 32);
  const uint32_t shared = ptx::shared_address(storage);
  const uint32_t patch = shared + args.patch_at + buffer * args.patch_bytes;
  const uint32_t gradient = shared + args.dz_at + buffer * args.dz_bytes;
  const int32_t* pixel = pixels_of(args, storage, buffer) + lane / 16 * 8 + lane % 8;
  const auto* tap = reinterpret_cast<const int32_t*>(storage + args.taps_at);
  // ldmatrix addresses. x: both vectors for eight pixels, then for the next eight. dz: eight and
  // the next eight pixels of a tile, then of the next tile.
  uint32_t from[S::kSteps];
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
    const int vector = min(2 * (role.step + s) + lane / 8 % 2, args.k_vectors - 1);
    from[s] = patch + role.unit * args.unit_vectors * 16 + tap[vector];
  }
  const uint32_t row =
      gradient + (lane / 8 % 2 * 8 + lane % 8) * args.dz_pitch + role.unit * args.slice_tiles * 16;
  const int rows = args.batches * kGroupedRows;
#pragma unroll 1
  for (int k = role.share; k < rows; k += args.shares) {
    uint32_t dz[S::kPairs][4];
#pragma unroll
    for (int p = 0; p < S::kPairs; ++p) {
      const bool is_whole = 2 * p + 1 < S::kTiles;
      ptx::load_transposed(
          dz[p], row + k * kGroupedRow * args.dz_pitch + p * 32 + (is_whole ? lane / 16 * 16 : 0));
    }
    const uint32_t first = pixel[k * kGroupedRow];
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      uint32_t x[4];
      ptx::load_transposed(x, from[s] + first);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        ptx::mma_m16n8k16<X>(sum[s][t], x, dz[t / 2][t % 2 * 2], dz[t / 2][t % 2 * 2 + 1]);
      }
    }
  }
}

// Where the gradient of an input channel's weight is, from that of the unit's first output channel;
// both channels are of the unit. Negative if they are of different groups.
template <class S>
__device__ __forceinline__ int element_of(const GroupedWeightArgs& args, int vector, int output) {
  const auto lane = static_cast<int>(ptx::thread_index() % 32);
  if constexpr (!S::kMixed) return (output * args.k_vectors + vector) * kGroupedVector + lane / 4;
  const auto tap = static_cast<int>(divide(static_cast<uint32_t>(vector), args.unit_divisor));
  const int input = (vector - tap * args.unit_vectors) * kGroupedVector + lane / 4;
  const auto of_input = divide(static_cast<uint32_t>(input), args.group_divisor);
  const auto of_output = divide(static_cast<uint32_t>(output), args.output_divisor);
  const int at = (output * args.kernel_h * args.kernel_w + tap) * args.group_inputs + input -
                 static_cast<int>(of_input) * args.group_inputs;
  return of_input == of_output ? at : -1;
}

// Writes the warp's sums: sum[s][t][2r + e] is of vector 2s + r of the role, channel lane / 4 in
// it, and of output channel 8t + 2 (lane % 4) + e.
template <class S>
__device__ __forceinline__ void store(const GroupedWeightArgs& args, const Role& role, int worker,
                                      const Sums<S>& sum) {
  const auto lane = static_cast<int>(ptx::thread_index() % 32);
  const Slice slice = Slice::self(args);
  const int unit = slice.unit + role.unit;
  if (unit >= args.units) return;
  const int64_t of_output = int64_t{args.kernel_h} * args.kernel_w * args.group_inputs;
  float* to = args.partial +
              (int64_t{worker} * args.shares + role.share) * args.outputs * of_output +
              unit * args.unit_tiles * 8 * of_output;
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int vector = 2 * (role.step + s) + r;
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        const int tile = slice.tile + t;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = element_of<S>(args, vector, tile * 8 + lane % 4 * 2 + e);
          const bool exists = vector < args.k_vectors && tile < args.unit_tiles && at >= 0;
          if (exists) to[at] = sum[s][t][2 * r + e];
        }
      }
    }
  }
}

template <class S>
__device__ __forceinline__ void run(const GroupedWeightArgs& args) {
  extern __shared__ __align__(128) uint8_t storage[];
  const uint32_t shared = ptx::shared_address(storage);
  const auto worker = static_cast<int>(divide(blockIdx.x, args.slices));
  const Role role = Role::self(args, S::kSteps);
  grouped::keep_taps(args, storage);
  const int64_t dz_stride[] = {args.dz_stride[0], args.dz_stride[1], args.dz_stride[2]};
  grouped::keep_places(args, dz_stride, storage);
  grouped::keep_sources(args, storage);
  __syncthreads();
  int tile = worker;
  int buffer = 0;
  const auto feed = [&](int of, int into) {
    grouped::feed<S::kAtOnce>(args, storage, of, shared + args.patch_at + into * args.patch_bytes);
    feed_gradient<S::kAtOnce>(args, storage, of, into);
  };
  feed(tile, buffer);
  Sums<S> sum = {};
#pragma unroll 1
  for (; tile < args.tiles; tile += args.workers) {
    ptx::copy_async_wait();
    __syncthreads();
    const int next = tile + args.workers;
    const int other = args.buffers == 2 ? buffer ^ 1 : buffer;
    if (args.buffers == 2 && next < args.tiles) feed(next, other);
    if (role.share < args.shares) {
      multiply<S>(args, storage, buffer, role, sum);
    }
    if (args.buffers == 1 && next < args.tiles) {
      __syncthreads();
      feed(next, other);
    }
    buffer = other;
  }
  if (role.share < args.shares) store<S>(args, role, worker, sum);
}

// Adds up partial sums: a warp has every kGroupedWarps-th of 32 elements.
template <class X>
__device__ __forceinline__ void add_up(const GroupedSumArgs& args) {
  __shared__ float part[kGroupedWarps][kGroupedSumElements];
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int64_t element = int64_t{blockIdx.x} * kGroupedSumElements + lane;
  const bool exists = element < args.elements;
  float sum = 0;
#pragma unroll 4
  for (int i = warp; i < args.count; i += kGroupedWarps) {
    if (exists) sum += args.partial[i * args.elements + element];
  }
  part[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || !exists) return;
#pragma unroll
  for (int i = 1; i < kGroupedWarps; ++i) sum += part[i][lane];
  const int64_t input = element % args.inputs;
  const int64_t tap = element / args.inputs % (args.kernel_h * args.kernel_w);
  const int64_t output = element / args.inputs / (args.kernel_h * args.kernel_w);
  static_cast<X*>(
      args.dw)[output * args.stride[0] + input * args.stride[1] +
               tap / args.kernel_w * args.stride[2] + tap % args.kernel_w * args.stride[3]] =
      convert<X>(sum);
}

}  // namespace fx_fuser::grouped_weight

#define FX_FUSER_GROUPED_WEIGHT(tiles, is_mixed, functor, scalars, Acc, Out, X)               \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGroupedThreads, 2)                  \
      fx_fuser_grouped_weight(const __grid_constant__ fx_fuser::GroupedWeightArgs args) {     \
    fx_fuser::grouped_weight::run<fx_fuser::grouped_weight::Shape<X, tiles, is_mixed>>(args); \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGroupedThreads)                     \
      fx_fuser_grouped_weight_sum(const __grid_constant__ fx_fuser::GroupedSumArgs args) {    \
    fx_fuser::grouped_weight::add_up<X>(args);                                                \
  }
