// Of the split product: from the sums to memory, and what is not finite or unsure computed again.
#pragma once

#include <type_traits>
#include <utility>

#include "linear_split_result.cuh"
#include "linear_split_tiles_sm90.cuh"

namespace fx_fuser::linear_split {

// A warp computes x[m, :] weight[n, :]ᵀ of a plane in fp32, as IEEE has it.
template <class X>
__device__ __forceinline__ float plain_product(const LinearSplitArgs& args, const Plane& plane,
                                               int m, int n) {
  constexpr int kInFlight = 8;
  const X* x = static_cast<const X*>(args.x) + offset_of(plane, args.x_plane) + m * args.x_stride_m;
  const float* weight =
      args.weight + offset_of(plane, args.weight_plane) + n * args.weight_stride_n;
  const int end = k_of(args.planes, plane);
  float sum = 0;
  for (int k0 = threadIdx.x % 32; k0 - static_cast<int>(threadIdx.x % 32) < end;
       k0 += 32 * kInFlight) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = k0 + 32 * i;
      if (k < end) {
        sum = fmaf(convert<float>(x[k * args.x_stride_k]), weight[k * args.weight_stride_k], sum);
      }
    }
    // A NaN stays one: a tensor full of them is soon done.
    if (__any_sync(0xFFFFFFFF, isnan(sum))) return NAN;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  }
  return sum;
}

template <class X, class Epilogue, int kScalars, class Out, class... In>
struct Finish {
  using Values = Inputs<std::index_sequence_for<In...>, In...>;
  static constexpr int kOperands = sizeof...(In);
  // A product alone, as backward passes need it over few k, is stored from the accumulators'
  // layout, in whole sectors. (With a longer epilogue ptxas then finds a worse order for the loop.)
  static constexpr bool kDirect = kOperands == 0 && kScalars == 0;
  // Where that goes is ours to choose: it can always be stored in pairs.
  static constexpr bool kIsPartial = std::is_same_v<Epilogue, Partial>;
  static constexpr int kBatches = kTileM / kBatchM;
  static constexpr int kElements = kBatchM * kWarpN / 32;  // of a lane in a batch
  // Of those, whose operands are loaded together: as many as leave no register to spill.
  static constexpr int kInFlight = kOperands < 2 ? 8 : kOperands < 4 ? 4 : kOperands < 8 ? 2 : 1;
  static constexpr int kPlaces = LinearResult::kFirstOperand + kOperands;
  static_assert(kElements % kInFlight == 0 && kBatches * kElements == 64);

  const LinearSplitArgs& args;
  Exchange& exchange;    // this warp's
  const int64_t& began;  // in shared memory: the clock when the block did
  int warp_n;            // the warp's first row of the weight, in the tile
  uint32_t unsure = 0;   // of any tile; the same in the warp's lanes of one lane % 4
  bool was_strained = false;
  float bias[kDirect ? 2 : 1];           // of the rows of the weight that the lane stores
  SplitRowFactors fetched[kTileM / 32];  // on their way to `exchange`
  float fetched_bias[kTileM / 32];

  // The result's row and column of x's row m and the weight's row n.
  __device__ __forceinline__ int row_of(int m, int n) const { return args.transposed ? n : m; }
  __device__ __forceinline__ int column_of(int m, int n) const { return args.transposed ? m : n; }

  // Its columns are the rows of x or those of the weight, and so are the elements of the bias.
  __device__ __forceinline__ float bias_of_m(int m) const {
    const float* from = args.result.bias;
    return args.transposed && from != nullptr && m < args.m ? from[m] : 0.0f;
  }
  __device__ __forceinline__ float bias_of_n(int n) const {
    const float* from = args.result.bias;
    return !args.transposed && from != nullptr && n < args.n ? from[n] : 0.0f;
  }

  // The warp's lanes find a place each, for all.
  __device__ __forceinline__ void find_places(const Plane& plane) const {
    const int i = min(static_cast<int>(threadIdx.x % 32), kPlaces - 1);
    exchange.place[i] = start_of(args.result.place[i], plane);
  }

  __device__ __forceinline__ void load(Values& in, int64_t row, int64_t column) const {
    in.load(args.result, [&](int i) { return exchange.place[i]; }, row, column);
  }

  __device__ __forceinline__ void store(const Values& in, int64_t row, int64_t column) const {
    linear_split::store<Epilogue, kScalars, Out>(
        args.result, in, [&](int i) { return exchange.place[i]; }, row, column);
  }

  // Where in the tile is sum[element] of a lane?
  static __device__ __forceinline__ int m_of(int element, int lane) {
    return element / 4 * 8 + lane % 4 * 2 + element % 2;
  }
  __device__ __forceinline__ int n_of(int element, int lane) const {
    return warp_n + lane / 4 + element / 2 % 2 * 8;
  }

  // Ahead of the tile's products, which hide the wait.
  __device__ __forceinline__ void begin(int index) {
    const Tile tile = tile_at(args, index);
    const int lane = threadIdx.x % 32;
    if constexpr (!kDirect) find_places(tile.at);
    const SplitRowFactors* x_factors = args.x_factors + int64_t{tile.plane} * args.m;
    if constexpr (kDirect) {
      bias[0] = bias_of_n(tile.n + n_of(0, lane));
      bias[1] = bias_of_n(tile.n + n_of(2, lane));
    } else {
      bias[0] = bias_of_n(tile.n + warp_n + lane % kWarpN);
    }
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      const int m = tile.m + i * 32 + lane;
      fetched[i] = m < args.m ? x_factors[m] : SplitRowFactors{0, 0};
      fetched_bias[i] = bias_of_m(m);
    }
  }

  __device__ __forceinline__ void place() {
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      exchange.x_unscale[i * 32 + threadIdx.x % 32] = fetched[i].unscale;
      exchange.x_least_sum[i * 32 + threadIdx.x % 32] = fetched[i].least_sum;
      exchange.bias[i * 32 + threadIdx.x % 32] = fetched_bias[i];
    }
    __syncwarp();
  }

  // Of x's row i of the tile: see strained_rows.
  __device__ __forceinline__ float least_sum(int i) const { return exchange.x_least_sum[i]; }

  // Rows are named as by strained_rows and strained_weights. One of x that has a z that is not
  // finite is done again whole.
  __device__ __forceinline__ void operator()(int index, const float (&sum)[64], uint32_t strained,
                                             uint32_t weights) {
    uint32_t rows;
    if constexpr (kDirect) {
      const Tile tile = tile_at(args, index);
      const bool keeps_z = args.result.place[LinearResult::kZ].data != nullptr;
      if (!kIsPartial && (keeps_z || (args.transposed && !args.pairs))) {
        rows = store_as_it_lies<Way::kAny>(tile, sum);
      } else if (args.transposed) {
        rows = store_as_it_lies<Way::kPairs>(tile, sum);
      } else {
        rows = store_as_it_lies<Way::kRows>(tile, sum);
      }
      rows = in_any_lane(rows);
    } else {
      rows = store_in_runs(tile_at(args, index), sum);
    }
    rows |= strained;
    const int lane = threadIdx.x % 32;
    if (lane < kLinearUnsureWords) unsure_rows(index)[lane] = lane < 4 ? rows : weights;
    unsure |= rows | weights;
    was_strained |= (strained | weights) != 0;
  }

  // The union of what the lanes of one lane % 4 name.
  static __device__ __forceinline__ uint32_t in_any_lane(uint32_t rows) {
    if (!__any_sync(0xFFFFFFFF, rows != 0)) return 0;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      rows |= __shfl_xor_sync(0xFFFFFFFF, rows, distance);
    }
    return rows;
  }

  // The same of a bit an element in store_in_runs' order.
  __device__ __forceinline__ uint32_t rows_of(uint64_t elements) const {
    if (!__any_sync(0xFFFFFFFF, elements != 0)) return 0;
    uint32_t rows = 0;
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      const uint32_t of_batch = elements >> batch * kElements & ((1u << kElements) - 1);
      uint32_t in_batch = 0;  // a bit a row of x
      if (args.transposed) {
        in_batch = __ballot_sync(0xFFFFFFFF, of_batch != 0);
      } else {
#pragma unroll 1
        for (int e = 0; e < kElements; ++e) {
          const uint32_t lanes = __ballot_sync(0xFFFFFFFF, of_batch >> e & 1);
          if (lanes & 0xFFFF) in_batch |= 1u << 2 * e;
          if (lanes >> kWarpN) in_batch |= 2u << 2 * e;
        }
      }
#pragma unroll
      for (int i = 0; i < kBatchM / 8; ++i) {
        const uint32_t pair = in_batch >> (8 * i + 2 * (threadIdx.x % 4)) & 3;
        rows |= pair << 2 * (batch * (kBatchM / 8) + i);
      }
    }
    return rows;
  }

  enum class Way { kRows, kPairs, kAny };
  struct alignas(2 * sizeof(Out)) Pair {
    Out value[2];
  };

  // Without branches an element, each of which would wait for the one before: all is computed, what
  // lies inside is stored. kRows: n are adjacent; kPairs: m are, and two can be stored at once;
  // kAny is for all else, with z.
  template <Way kWay>
  __device__ __forceinline__ uint32_t store_as_it_lies(Tile tile, const float (&sum)[64]) const {
    uint32_t broken = 0;
    const int lane = threadIdx.x % 32;
    const int m0 = m_of(0, lane);
    const int rows = args.m - (tile.m + m0);
    const int n = tile.n + n_of(0, lane);
    const bool has_n[2] = {n < args.n, n + 8 < args.n};
    const bool transposed = kWay == Way::kPairs || (kWay == Way::kAny && args.transposed);
    const LinearResult& to = args.result;
    const auto begin = [&](int place, int64_t m_step, int64_t n_step) {
      const int64_t bytes = place == LinearResult::kZ ? sizeof(float) : sizeof(Out);
      return static_cast<char*>(start_of(to.place[place], tile.at)) +
             ((tile.m + m0) * m_step + n * n_step) * bytes;
    };
    const int64_t m_step = transposed ? 1 : to.out_stride;
    const int64_t n_step = transposed ? to.out_stride : 1;
    Out* out = reinterpret_cast<Out*>(begin(LinearResult::kOut, m_step, n_step));
    const int64_t z_m_step = transposed ? 1 : to.z_stride;
    const int64_t z_n_step = transposed ? to.z_stride : 1;
    float* z = nullptr;
    const bool keeps_z = kWay == Way::kAny && to.place[LinearResult::kZ].data != nullptr;
    if (keeps_z) z = reinterpret_cast<float*>(begin(LinearResult::kZ, z_m_step, z_n_step));
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i0 = 0; i0 < 16; i0 += kAtOnce) {
      float2 unscale[kAtOnce];
      float2 bias_of_m[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int m = m0 + 8 * (i0 + i);
        unscale[i] = *reinterpret_cast<const float2*>(&exchange.x_unscale[m]);
        if (kWay != Way::kRows) bias_of_m[i] = *reinterpret_cast<const float2*>(&exchange.bias[m]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Pair pair;
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const int element = 4 * (i0 + i) + 2 * r + t;
            const float of_m = kWay == Way::kRows ? 0 : t ? bias_of_m[i].y : bias_of_m[i].x;
            Values in;
            in.value[0] =
                fmaf(sum[element], t ? unscale[i].y : unscale[i].x, transposed ? of_m : bias[r]);
            const bool inside = 8 * (i0 + i) + t < rows && has_n[r];
            pair.value[t] = result_of<Epilogue, kScalars, Out>(to, in);
            if (kWay != Way::kPairs && inside) out[t * m_step + 8 * r * n_step] = pair.value[t];
            if (keeps_z && inside) z[t * z_m_step + 8 * r * z_n_step] = in.value[0];
            broken |= static_cast<uint32_t>(inside && !isfinite(in.value[0])) << (2 * (i0 + i) + t);
          }
          if (kWay == Way::kPairs && 8 * (i0 + i) < rows && has_n[r]) {
            *reinterpret_cast<Pair*>(out + 8 * r * n_step) = pair;
          }
        }
        out += 8 * m_step;
        if (keeps_z) z += 8 * z_m_step;
      }
    }
    return broken;
  }

  // A batch's sums, still scaled as x's rows are, to shared memory as a warp's lanes store them.
  template <bool kTransposed>
  __device__ __forceinline__ void give_batch(int batch, const float (&sum)[64]) const {
    const int lane = threadIdx.x % 32;
    const int n = lane / 4;
#pragma unroll
    for (int i = 0; i < kBatchM / 8; ++i) {
      const int m = 8 * i + 2 * (lane % 4);
      const float2 unscale =
          *reinterpret_cast<const float2*>(&exchange.x_unscale[batch * kBatchM + m]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* pair = &sum[batch * kElements + 4 * i + 2 * r];
        const float2 z = make_float2(pair[0] * unscale.x, pair[1] * unscale.y);
        if constexpr (kTransposed) {
          *reinterpret_cast<float2*>(&exchange.transposed_z[n + 8 * r][m]) = z;
        } else {
          exchange.z[m][n + 8 * r] = z.x;
          exchange.z[m + 1][n + 8 * r] = z.y;
        }
      }
    }
  }

  // Batch by batch through shared memory, so that a warp reads and writes runs of the result's
  // columns: for each of a lane's 16 elements, two rows of x and all 16 n; or one n and 32 rows of
  // x. In both a lane's column stays the same, and its elements are as far apart in `exchange`.
  __device__ __forceinline__ uint32_t store_in_runs(Tile tile, const float (&sum)[64]) const {
    static_assert(kTransposedPitch == 2 * kExchangePitch);
    uint64_t broken = 0;
    const int lane = threadIdx.x % 32;
    const bool transposed = args.transposed;
    const int rows = row_of(args.m, args.n);
    const int columns = column_of(args.m, args.n);
    const int step = transposed ? 1 : 2;
    const float* z =
        transposed ? &exchange.transposed_z[0][lane] : &exchange.z[lane / kWarpN][lane % kWarpN];
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int first_m = batch * kBatchM + (transposed ? lane : lane / kWarpN);
      const int first_n = warp_n + (transposed ? 0 : lane % kWarpN);
      const int first_row = row_of(tile.m + first_m, tile.n + first_n);
      const int column = column_of(tile.m + first_m, tile.n + first_n);
      const float added = transposed ? exchange.bias[first_m] : bias[0];
      if (transposed) {
        give_batch<true>(batch, sum);
      } else {
        give_batch<false>(batch, sum);
      }
      __syncwarp();
#pragma unroll 1
      for (int e0 = 0; e0 < kElements; e0 += kInFlight) {
        Values in[kInFlight];
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) {
          const int row = first_row + (e0 + e) * step;
          if (row < rows && column < columns) {
            in[e].value[0] = z[(e0 + e) * kTransposedPitch] + added;
            load(in[e], row, column);
          }
        }
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) {
          const int row = first_row + (e0 + e) * step;
          if (row < rows && column < columns) {
            store(in[e], row, column);
            if (!isfinite(in[e].value[0])) broken |= uint64_t{1} << (batch * kElements + e0 + e);
          }
        }
      }
      __syncwarp();
    }
    return rows_of(broken);
  }

  // This warp's of a tile.
  __device__ __forceinline__ uint32_t* unsure_rows(int index) const {
    const int64_t warp = int64_t{index} * (kLinearConsumerThreads / 32) + threadIdx.x / 32;
    return args.unsure + warp * kLinearUnsureWords;
  }

  // A lane's elements that are in unsure rows.
  __device__ __forceinline__ uint64_t unsure_elements(int index) const {
    const int lane = threadIdx.x % 32;
    const uint32_t rows = unsure_rows(index)[lane % 4];
    const uint32_t weights = unsure_rows(index)[kLinearUnsureWords - 1];
    if (!__any_sync(0xFFFFFFFF, (rows | weights) != 0)) return 0;
    const Tile tile = tile_at(args, index);
    uint64_t elements = 0;
#pragma unroll 1
    for (int element = 0; element < 64; ++element) {
      const int m = m_of(element, lane);
      const uint32_t of_lane = __shfl_sync(0xFFFFFFFF, rows, m / 2 % 4);
      const uint64_t is_unsure =
          (of_lane >> (m / 8 * 2 + m % 2) | weights >> (lane / 4 * 4 + element / 2 % 2)) & 1;
      if (tile.m + m < args.m && tile.n + n_of(element, lane) < args.n) {
        elements |= is_unsure << element;
      }
    }
    return elements;
  }

  // After all tiles: divergent code within the loop over them would cost ptxas its knowledge that
  // the stages' addresses are uniform, and descriptors would then reach each wgmma through R2UR.
  __device__ __forceinline__ void repair() const {
    if (!__any_sync(0xFFFFFFFF, unsure != 0)) return;
    __syncwarp();  // the rows are read by other lanes than wrote them
    const int64_t ended = clock64();
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
      repair(tile_at(args, index), unsure_elements(index));
    }
    // The kernel takes as long as its slowest warp.
    const auto product = static_cast<float>(ended - began);
    const auto repairs = static_cast<float>(clock64() - ended);
    const float times = repairs / (args.bearable * product);
    if (was_strained && times > 1) *args.was_strained = static_cast<uint32_t>(fminf(times, 1000));
  }

  // The warp goes through its lanes' elements one by one.
  __device__ __forceinline__ void repair(Tile tile, uint64_t elements) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the last tile's places have been read
    find_places(tile.at);
    __syncwarp();
    while (const uint32_t lanes = __ballot_sync(0xFFFFFFFF, elements != 0)) {
      const int owner = __ffs(lanes) - 1;
      const int bit = __ffsll(__shfl_sync(0xFFFFFFFF, elements, owner)) - 1;
      const int m = tile.m + m_of(bit, owner);
      const int n = tile.n + n_of(bit, owner);
      const float product = plain_product<X>(args, tile.at, m, n);
      if (lane == owner) {
        Values in;
        in.value[0] = product + bias_of_m(m) + bias_of_n(n);
        load(in, row_of(m, n), column_of(m, n));
        store(in, row_of(m, n), column_of(m, n));
        elements &= elements - 1;
      }
    }
  }
};

}  // namespace fx_fuser::linear_split
