// Mean and biased variance of every channel, for BatchNorm in training, in one read of x.
//
// E[x^2] - E[x]^2 cancels, and sums shifted by one chosen element lose accuracy if that element is
// an outlier. So each thread takes small groups of values, each with its own pivot, and merges
// their moments. Blocks write partial moments; a second kernel merges those in double. The order of
// all sums depends on the shape only, so results are bit for bit the same from run to run.
#include "common/convert.cuh"
#include "common/moments.cuh"
#include "common/ptx_sm90.cuh"
#include "pointwise/batch_stats_args.h"

namespace fx_fuser {

// Moments of a few values x about a pivot p, which is one of them: with d = x - p,
//   mean = p + sum(d) / n,  M2 = sum(d^2) - sum(d)^2 / n.
// If the pivot is far from the other values, it is itself that large a deviation, so
// M2 >= d^2 (1 - 1/n) and the subtraction loses at most a factor n. A constant group gives exactly
// (n, p, 0).
template <class Acc>
struct Group {
  Acc count = 0;
  Acc sum = 0;
  Acc squares = 0;

  __device__ __forceinline__ void add(Acc deviation) {
    count += Acc(1);
    sum += deviation;
    squares += deviation * deviation;
  }

  __device__ __forceinline__ Moments<Acc> moments(Acc pivot) const {
    if (count == Acc(0)) return {};
    const Acc shift = sum / count;
    const Acc m2 = squares - sum * shift;
    return {count, pivot + shift, m2 < Acc(0) ? Acc(0) : m2};
  }
};

template <class Acc>
__device__ __forceinline__ Moments<Acc> from_lane_above(const Moments<Acc>& mine, int distance) {
  return {__shfl_down_sync(~0u, mine.count, distance), __shfl_down_sync(~0u, mine.mean, distance),
          __shfl_down_sync(~0u, mine.m2, distance)};
}

// Thread 0 returns the moments of the whole block.
template <int kThreads, class Acc>
__device__ __forceinline__ Moments<Acc> merge_block(Moments<Acc> mine) {
  __shared__ Moments<Acc> of_warp[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine.merge(from_lane_above(mine, distance));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) mine.merge(of_warp[warp]);
  }
  return mine;
}

// ---- [samples, channels, plane] -----------------------------------------------------------------

// One 16-byte vector of a run of `plane` elements, which may begin and end within a vector:
// elements [begin, end) of the vector belong to the run.
template <class T, int kWidth>
struct Piece {
  Vec<T, kWidth> raw;
  int begin;
  int end;

  __device__ __forceinline__ bool is_whole() const { return begin == 0 && end == kWidth; }
};

template <class T, int kWidth>
__device__ __forceinline__ Piece<T, kWidth> load_piece(const PlanesArgs& args, int64_t channel,
                                                       uint64_t unit) {
  const uint64_t sample = divide(unit, args.vectors);
  const int64_t nth = unit - sample * args.vectors.size;
  const int64_t run = (sample * args.channels + channel) * args.plane + args.skew;
  const int64_t first = (run / kWidth + nth) * kWidth;
  Piece<T, kWidth> piece{};
  if (unit >= args.units) return piece;
  piece.begin = static_cast<int>(max(run - first, int64_t{0}));
  piece.end = static_cast<int>(min(run + args.plane - first, int64_t{kWidth}));

  const T* from = static_cast<const T*>(args.x) + first;
  if (piece.is_whole()) {
    piece.raw = *reinterpret_cast<const Vec<T, kWidth>*>(from);
  } else {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (e >= piece.begin && e < piece.end) piece.raw.element[e] = from[e];
    }
  }
  return piece;
}

template <class Acc, class T, int kWidth>
__device__ __forceinline__ Moments<Acc> moments_of(
    const Piece<T, kWidth> (&piece)[kStatsInFlight]) {
  bool all_whole = true;
#pragma unroll
  for (int i = 0; i < kStatsInFlight; ++i) all_whole &= piece[i].is_whole();

  Group<Acc> group;
  if (all_whole) {
    const Acc pivot = convert<Acc>(piece[0].raw.element[0]);
#pragma unroll
    for (int i = 0; i < kStatsInFlight; ++i) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) group.add(convert<Acc>(piece[i].raw.element[e]) - pivot);
    }
    return group.moments(pivot);
  }

  Acc pivot = 0;
#pragma unroll
  for (int i = 0; i < kStatsInFlight; ++i) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const bool inside = e >= piece[i].begin && e < piece[i].end;
      if (inside) pivot = convert<Acc>(piece[i].raw.element[e]);
    }
  }
#pragma unroll
  for (int i = 0; i < kStatsInFlight; ++i) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const bool inside = e >= piece[i].begin && e < piece[i].end;
      if (inside) group.add(convert<Acc>(piece[i].raw.element[e]) - pivot);
    }
  }
  return group.moments(pivot);
}

// Block = (split, channel), channel fastest: neighbouring blocks read neighbouring memory.
template <class T, class Acc>
__device__ __forceinline__ void planes(const PlanesArgs& args) {
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t channel = blockIdx.x % args.channels;
  const int64_t split = blockIdx.x / args.channels;
  const uint64_t begin = split * args.units_per_block;
  const uint64_t end = min(begin + args.units_per_block, args.units);

  Moments<Acc> mine{};
  for (uint64_t unit = begin + threadIdx.x; unit < end; unit += kStatsInFlight * kStatsThreads) {
    Piece<T, kWidth> piece[kStatsInFlight];
#pragma unroll
    for (int i = 0; i < kStatsInFlight; ++i) {
      piece[i] = load_piece<T, kWidth>(args, channel, unit + i * kStatsThreads);
    }
    mine.merge(moments_of<Acc>(piece));
  }
  const Moments<Acc> whole = merge_block<kStatsThreads>(mine);
  if (threadIdx.x == 0) {
    static_cast<Moments<Acc>*>(args.partial)[channel * args.splits + split] = whole;
  }
}

// ---- [rows, channels] ---------------------------------------------------------------------------

// Consecutive threads take consecutive vectors of channels and then the next row, so that a block
// reads consecutive memory even if a row is short. Block = (split, tile of channels).
template <class T, int kWidth, class Acc>
__device__ __forceinline__ void rows(const RowsArgs& args) {
  const int64_t vectors = args.channels / kWidth;
  const int tile = static_cast<int>(min(vectors, int64_t{kStatsThreads}));
  const int64_t tiles = (vectors + tile - 1) / tile;
  const int lanes = kStatsThreads / tile;  // rows read side by side
  const int lane = threadIdx.x / tile;
  const int64_t vector = (blockIdx.x % tiles) * tile + threadIdx.x % tile;
  const int64_t split = blockIdx.x / tiles;
  const int64_t end = min((split + 1) * args.rows_per_block, args.rows);
  const bool active = lane < lanes && vector < vectors;

  Moments<Acc> mine[kWidth] = {};
  for (int64_t row = split * args.rows_per_block + lane; active && row < end;
       row += kStatsInFlight * lanes) {
    const T* from = static_cast<const T*>(args.x) + row * args.channels + vector * kWidth;
    Vec<T, kWidth> raw[kStatsInFlight];
#pragma unroll
    for (int i = 0; i < kStatsInFlight; ++i) {
      if (row + i * lanes < end) {
        raw[i] = *reinterpret_cast<const Vec<T, kWidth>*>(from + i * lanes * args.channels);
      }
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const Acc pivot = convert<Acc>(raw[0].element[e]);
      Group<Acc> group;
#pragma unroll
      for (int i = 0; i < kStatsInFlight; ++i) {
        if (row + i * lanes < end) group.add(convert<Acc>(raw[i].element[e]) - pivot);
      }
      mine[e].merge(group.moments(pivot));
    }
  }

  __shared__ Moments<Acc> of_thread[kWidth][kStatsThreads];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) of_thread[e][threadIdx.x] = mine[e];
  for (int live = lanes; live > 1;) {
    const int half = (live + 1) / 2;
    __syncthreads();
    if (lane + half < live) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        of_thread[e][threadIdx.x].merge(of_thread[e][threadIdx.x + half * tile]);
      }
    }
    live = half;
  }
  if (active && lane == 0) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const int64_t channel = vector * kWidth + e;
      static_cast<Moments<Acc>*>(args.partial)[channel * args.splits + split] =
          of_thread[e][threadIdx.x];
    }
  }
}

// ---- partial moments to statistics --------------------------------------------------------------

// Block = channel.
template <class Acc>
__device__ __forceinline__ void combine(const CombineArgs& args) {
#if __CUDA_ARCH__ >= 900
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
#endif
  const auto* partial = static_cast<const Moments<Acc>*>(args.partial) + blockIdx.x * args.splits;
  Moments<double> mine{};
  for (int64_t split = threadIdx.x; split < args.splits; split += kStatsThreads) {
    mine.merge({partial[split].count, partial[split].mean, partial[split].m2});
  }
  const Moments<double> whole = merge_block<kStatsThreads>(mine);
  if (threadIdx.x == 0) {
    // torch.var_mean of an empty tensor is (NaN, NaN).
    const double mean = whole.count > 0 ? whole.mean : nan("");
    static_cast<Acc*>(args.mean)[blockIdx.x] = static_cast<Acc>(mean);
    static_cast<Acc*>(args.variance)[blockIdx.x] = static_cast<Acc>(whole.m2 / whole.count);
  }
}

}  // namespace fx_fuser

// A minimum of one block per SM: without it ptxas spills to make room for a second one.
#define FX_FUSER_STATS_KERNEL(name, Args, ...)                                   \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kStatsThreads, 1)       \
      fx_fuser_batch_stats_##name(const __grid_constant__ fx_fuser::Args args) { \
    fx_fuser::__VA_ARGS__(args);                                                 \
  }

#define FX_FUSER_STATS_OF(suffix, T, Acc)                                      \
  FX_FUSER_STATS_KERNEL(planes_##suffix, PlanesArgs, planes<T, Acc>)           \
  FX_FUSER_STATS_KERNEL(rows_##suffix, RowsArgs, rows<T, 16 / sizeof(T), Acc>) \
  FX_FUSER_STATS_KERNEL(rows_narrow_##suffix, RowsArgs, rows<T, 1, Acc>)       \
  FX_FUSER_STATS_KERNEL(combine_##suffix, CombineArgs, combine<Acc>)

FX_FUSER_STATS_OF(float32, float, float)
FX_FUSER_STATS_OF(float64, double, double)
FX_FUSER_STATS_OF(float16, __half, float)
FX_FUSER_STATS_OF(bfloat16, __nv_bfloat16, float)
