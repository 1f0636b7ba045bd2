// The pre-pass of linear_split_sm90.cuh: splits rows of x into hi and lo and computes each row's
// factors, per plane. k is stored in the order in which the main loop has the weight in its
// registers: unchanged for N-major weights, else, in each 32 of k,
//   position 16j + 8b + 2c + t holds k = 8c + 4j + 2b + t        c < 4; j, b, t < 2
// One kernel for rows, and one for rows that are columns in memory. Both produce the same bits.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "common/split_sm90.cuh"
#include "linear/linear_split_args.h"

namespace fx_fuser {

struct Octet {
  float4 half[2];
};

template <class X>
__device__ __forceinline__ Octet load_octet(const SplitArgs& args, const X* row, int k,
                                            int columns) {
  if (args.vectors && k + kSplitWidth <= columns) {
    if constexpr (std::is_same_v<X, float>) {
      const auto* from = reinterpret_cast<const float4*>(row + k);
      return {from[0], from[1]};
    } else {
      const auto from = *reinterpret_cast<const Vec<X, kSplitWidth>*>(row + k);
      const auto at = [&](int i) { return convert<float>(from.element[i]); };
      return {make_float4(at(0), at(1), at(2), at(3)), make_float4(at(4), at(5), at(6), at(7))};
    }
  }
  const auto at = [&](int i) {
    return k + i < columns ? convert<float>(row[(k + i) * args.x_stride_k]) : 0.0f;
  };
  return {make_float4(at(0), at(1), at(2), at(3)), make_float4(at(4), at(5), at(6), at(7))};
}

__device__ __forceinline__ float squares_of(const float4& v) {
  return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
}

// The result of the search for a row's scale.
struct RowSearch {
  float largest;
  float squares;  // sum of squares

  __device__ __forceinline__ void add(const Octet& octet) {
#pragma unroll
    for (const float4& v : octet.half) {
      largest = fmaxf(largest, largest_of(v));
      squares += squares_of(v);
    }
  }
  __device__ __forceinline__ void add(const RowSearch& other) {
    largest = fmaxf(largest, other.largest);
    squares += other.squares;
  }

  // least_sum: a part for the row's norm, plus a quarter of the most for the weight's row, whose
  // norm is at most 2^10 sqrt(k) if the largest of its first columns is the largest of all. It is
  // the most if the squares overflow, or if values are so small that squares underflow.
  __device__ __forceinline__ SplitRowFactors factors(const Scale& scale, float most) const {
    constexpr float kPartOfNorm = 0.125f;
    constexpr float kLeastSquared = 0x1p-45f;
    const float norm = sqrtf(squares) * scale.scale;
    const float least = fminf(most, kPartOfNorm * norm + most / 4);
    return {scale.unscale, largest < kLeastSquared ? most : least};
  }
};

// In each quad of lanes, word q of lane c goes to lane q as word c.
__device__ __forceinline__ void transpose_quads(uint32_t (&word)[4]) {
  const auto exchange = [&](int low, int high, bool upper, int distance) {
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, upper ? word[low] : word[high], distance);
    if (upper) {
      word[low] = received;
    } else {
      word[high] = received;
    }
  };
  const bool odd = threadIdx.x & 1;
  const bool second_pair = threadIdx.x & 2;
  exchange(0, 1, odd, 1);
  exchange(2, 3, odd, 1);
  exchange(0, 2, second_pair, 2);
  exchange(1, 3, second_pair, 2);
}

// The destination of a plane's row.
template <class X>
struct SplitRow {
  __half* hi;
  __half* lo;

  static __device__ __forceinline__ SplitRow of(const SplitArgs& args, int64_t plane, int row) {
    const int64_t part = int64_t{args.rows} * args.padded_k;
    constexpr int kParts = kHasLo<X> ? 2 : 1;
    __half* hi =
        static_cast<__half*>(args.split) + kParts * plane * part + int64_t{row} * args.padded_k;
    return {hi, hi + part};
  }

  __device__ __forceinline__ void store(int k, const uint32_t (&hi_word)[4],
                                        const uint32_t (&lo_word)[4]) const {
    *reinterpret_cast<uint4*>(hi + k) = make_uint4(hi_word[0], hi_word[1], hi_word[2], hi_word[3]);
    if constexpr (kHasLo<X>) {
      *reinterpret_cast<uint4*>(lo + k) =
          make_uint4(lo_word[0], lo_word[1], lo_word[2], lo_word[3]);
    }
  }
};

template <class X>
__device__ __forceinline__ const X* row_of(const SplitArgs& args, const Plane& at, int r) {
  return static_cast<const X*>(args.x) + offset_of(at, args.x_plane) + r * args.x_stride_m;
}

// All lanes of a warp must call this, since they exchange words.
template <class X>
__device__ __forceinline__ void store_octet(const SplitArgs& args, const SplitRow<X>& to,
                                            const Scale& scale, const Octet& octet, int k,
                                            bool writes = true) {
  uint32_t hi_word[4];  // word 2j + b
  uint32_t lo_word[4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float4 v = octet.half[j];
    const SplitPair front = split(v.x * scale.scale, v.y * scale.scale);
    const SplitPair back = split(v.z * scale.scale, v.w * scale.scale);
    hi_word[2 * j] = front.hi;
    hi_word[2 * j + 1] = back.hi;
    lo_word[2 * j] = front.lo;
    lo_word[2 * j + 1] = back.lo;
  }
  if (!args.natural) {
    transpose_quads(hi_word);
    if constexpr (kHasLo<X>) transpose_quads(lo_word);
  }
  if (writes && k < args.padded_k) to.store(k, hi_word, lo_word);
}

// One cluster per row of x.
template <class X>
__device__ __forceinline__ void split_long_rows(const SplitArgs& args) {
  __shared__ RowSearch of_warp[kSplitThreads / 32];
  __shared__ RowSearch of_block[kSplitMaxCluster];

  ptx::cluster_arrive();  // has started
  ptx::launch_dependents();
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int cluster = static_cast<int>(ptx::cluster_size());
  const int threads = static_cast<int>(blockDim.x);
  const uint32_t unit = blockIdx.x / cluster;
  const uint32_t plane = divide(unit, args.units);
  const int r = static_cast<int>(unit - plane * args.units.size);
  const Plane at = plane_at(args.planes, plane);
  const int columns = k_of(args.planes, at);
  const X* row = row_of<X>(args, at, r);
  const int thread_k = threadIdx.x * kSplitWidth;
  const int first = rank * threads * kSplitWidth;
  const int step = cluster * threads * kSplitWidth;

  Octet kept[kSplitKept];
  RowSearch found{};
#pragma unroll
  for (int i = 0; i < kSplitKept; ++i) {
    kept[i] = load_octet(args, row, first + thread_k + i * step, columns);
  }
#pragma unroll
  for (int i = 0; i < kSplitKept; ++i) found.add(kept[i]);
  for (int k = first + thread_k + kSplitKept * step; k < columns; k += step) {
    found.add(load_octet(args, row, k, columns));
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    found.add(RowSearch{__shfl_xor_sync(0xFFFFFFFF, found.largest, distance),
                        __shfl_xor_sync(0xFFFFFFFF, found.squares, distance)});
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = found;
  __syncthreads();
  found = of_warp[0];
  for (int warp = 1; warp < threads / 32; ++warp) found.add(of_warp[warp]);
  ptx::cluster_wait();
  if (threadIdx.x < cluster) {
    ptx::store_to_block(ptx::shared_address(&of_block[rank].largest), threadIdx.x, found.largest);
    ptx::store_to_block(ptx::shared_address(&of_block[rank].squares), threadIdx.x, found.squares);
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  found = of_block[0];
  for (int block = 1; block < cluster; ++block) found.add(of_block[block]);

  const Scale scale = Scale::of(found.largest);
  if (rank == 0 && threadIdx.x == 0) args.factors[unit] = found.factors(scale, args.least_sum);
  if (args.split == nullptr) return;
  const auto to = SplitRow<X>::of(args, plane, r);
#pragma unroll
  for (int i = 0; i < kSplitKept; ++i) {
    store_octet(args, to, scale, kept[i], first + thread_k + i * step);
  }
  for (int base = first + kSplitKept * step; base < args.padded_k; base += step) {
    const int k = base + thread_k;
    store_octet(args, to, scale, load_octet(args, row, k, columns), k);  // from L2
  }
}

// `args.lanes` threads of a warp per row, which keep all of it in registers. With a block per row,
// starting blocks would take longer than moving such short rows (figures in NOTES.md).
template <class X>
__device__ __forceinline__ void split_short_rows(const SplitArgs& args) {
  ptx::launch_dependents();
  const uint32_t lanes = args.lanes;
  const uint32_t index = blockIdx.x * (kSplitThreads / lanes) + threadIdx.x / lanes;
  const uint32_t rows = args.units.size * args.planes.batches.size * args.planes.chunks;
  const uint32_t unit = min(index, rows - 1);
  const bool writes = index < rows;
  const uint32_t plane = divide(unit, args.units);
  const int r = static_cast<int>(unit - plane * args.units.size);
  const Plane at = plane_at(args.planes, plane);
  const int columns = k_of(args.planes, at);
  const X* row = row_of<X>(args, at, r);
  const int first = static_cast<int>(threadIdx.x % lanes) * kSplitWidth;
  const int step = static_cast<int>(lanes) * kSplitWidth;

  Octet kept[kSplitKept];
  RowSearch found{};
#pragma unroll
  for (int i = 0; i < kSplitKept; ++i) kept[i] = load_octet(args, row, first + i * step, columns);
#pragma unroll
  for (int i = 0; i < kSplitKept; ++i) found.add(kept[i]);
  for (int distance = static_cast<int>(lanes) / 2; distance > 0; distance /= 2) {
    found.add(RowSearch{__shfl_xor_sync(0xFFFFFFFF, found.largest, distance),
                        __shfl_xor_sync(0xFFFFFFFF, found.squares, distance)});
  }
  const Scale scale = Scale::of(found.largest);
  if (writes && first == 0) args.factors[unit] = found.factors(scale, args.least_sum);
  if (args.split == nullptr) return;
  const auto to = SplitRow<X>::of(args, plane, r);
#pragma unroll
  for (int i = 0; i < kSplitKept; ++i) {
    store_octet(args, to, scale, kept[i], first + i * step, writes);
  }
}

template <class X>
__device__ __forceinline__ void split_rows(const SplitArgs& args) {
  if (args.lanes > 0) {
    split_short_rows<X>(args);
  } else {
    split_long_rows<X>(args);
  }
}

// A tile [k][column] in the shared memory of split_columns.
struct SplitTile {
  float value[kSplitDepth][kSplitStrip];

  // The k of element i of the eight that go to positions 8q...8q + 7.
  static __device__ __forceinline__ int k_at(bool natural, int q, int i) {
    const int in_chunks = q / 4 * 32 + i / 2 * 8 + q / 2 % 2 * 4 + q % 2 * 2 + i % 2;
    return natural ? 8 * q + i : in_chunks;
  }
  // The q of the octet that k belongs to.
  static __device__ __forceinline__ int octet_of(bool natural, int k) {
    return natural ? k / 8 : k / 32 * 4 + k / 2 % 4;
  }
  // Swizzled by q, so that four columns by eight q are in 32 different banks.
  __device__ __forceinline__ float& at(int k, int column, int q) {
    return value[k][column ^ q * 4];
  }
};
static_assert(kSplitDepth == 64 && kSplitStrip == 32);

// One cluster per strip of columns, which are rows of x; each of its blocks has a part of k.
template <class X>
__device__ __forceinline__ void split_columns(const SplitArgs& args) {
  constexpr int kWarps = kSplitThreads / 32;
  constexpr int kInFlight = kSplitDepth / kWarps;
  static_assert(kWarps * 4 == kSplitStrip && kWarps >= kSplitMaxCluster);
  __shared__ SplitTile tile;
  __shared__ RowSearch of_warp[kWarps][kSplitStrip];
  __shared__ RowSearch of_block[kSplitMaxCluster][kSplitStrip];

  ptx::cluster_arrive();  // has started
  ptx::launch_dependents();
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int cluster = static_cast<int>(ptx::cluster_size());
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t unit = blockIdx.x / cluster;
  const uint32_t plane = divide(unit, args.units);
  const int first_row = static_cast<int>(unit - plane * args.units.size) * kSplitStrip;
  const Plane at = plane_at(args.planes, plane);
  const int tiles = args.padded_k / kSplitDepth;
  const int tiles_of_block = (tiles + cluster - 1) / cluster;
  const int begin = min(rank * tiles_of_block, tiles) * kSplitDepth;
  const int end = min((rank + 1) * tiles_of_block, tiles) * kSplitDepth;
  // Columns beyond the last have no elements.
  const int columns = first_row + lane < args.rows ? k_of(args.planes, at) : 0;
  const X* x = static_cast<const X*>(args.x) + offset_of(at, args.x_plane) +
               (first_row + lane) * args.x_stride_m;

  float value[kInFlight];
  const auto load = [&](int k0) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = k0 + warp + i * kWarps;
      value[i] = k < columns ? convert<float>(x[k * args.x_stride_k]) : 0.0f;
    }
  };

  RowSearch found{};
  for (int k0 = begin; k0 < end; k0 += kSplitDepth) {
    load(k0);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) found.add(RowSearch{fabsf(value[i]), value[i] * value[i]});
  }
  of_warp[warp][lane] = found;
  __syncthreads();
  found = of_warp[0][lane];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) found.add(of_warp[i][lane]);
  ptx::cluster_wait();
  if (warp < cluster) {
    RowSearch& to = of_block[rank][lane];
    ptx::store_to_block(ptx::shared_address(&to.largest), warp, found.largest);
    ptx::store_to_block(ptx::shared_address(&to.squares), warp, found.squares);
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  found = of_block[0][lane];
  for (int block = 1; block < cluster; ++block) found.add(of_block[block][lane]);
  const Scale of_lane = Scale::of(found.largest);
  if (rank == 0 && warp == 0 && first_row + lane < args.rows) {
    args.factors[int64_t{plane} * args.rows + first_row + lane] =
        found.factors(of_lane, args.least_sum);
  }
  if (args.split == nullptr) return;

  // Eight lanes write the 128 bytes of a row, four rows per warp.
  const int column = warp * 4 + lane / 8;
  const int q = lane % 8;
  const float scale = __shfl_sync(0xFFFFFFFF, of_lane.scale, column);
  const auto to = SplitRow<X>::of(args, plane, first_row + column);
  if (begin < end) load(begin);
  for (int k0 = begin; k0 < end; k0 += kSplitDepth) {
    __syncthreads();  // the previous tile has been read
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = warp + i * kWarps;
      tile.at(k, lane, SplitTile::octet_of(args.natural, k)) = value[i];
    }
    __syncthreads();
    if (k0 + kSplitDepth < end) load(k0 + kSplitDepth);
    uint32_t hi_word[4];
    uint32_t lo_word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = tile.at(SplitTile::k_at(args.natural, q, 2 * i), column, q);
      const float odd = tile.at(SplitTile::k_at(args.natural, q, 2 * i + 1), column, q);
      const SplitPair pair = split(even * scale, odd * scale);
      hi_word[i] = pair.hi;
      lo_word[i] = pair.lo;
    }
    if (first_row + column < args.rows) to.store(k0 + 8 * q, hi_word, lo_word);
  }
}

}  // namespace fx_fuser
