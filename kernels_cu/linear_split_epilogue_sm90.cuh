// Of the split product: from the sums to memory, and what is not finite or unsure computed again.
#pragma once

#include <utility>

#include "linear_split_result.cuh"
#include "linear_split_tiles_sm90.cuh"

namespace fx_fuser::linear_split {

// A warp computes x[m, :] weight[n, :]ᵀ of a plane in fp32, as IEEE has it.
__device__ __forceinline__ float plain_product(const LinearSplitArgs& args, const Plane& plane,
                                               int m, int n) {
  constexpr int kInFlight = 8;
  const float* x = args.x + offset_of(plane, args.x_plane) + m * args.x_stride_m;
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
        sum = fmaf(x[k * args.x_stride_k], weight[k * args.weight_stride_k], sum);
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

template <class Epilogue, int kScalars, class Out, class... In>
struct Finish {
  using Values = Inputs<std::index_sequence_for<In...>, In...>;
  static constexpr int kOperands = sizeof...(In);
  // A product alone, as backward passes need it over few k, is stored from the accumulators'
  // layout, in whole sectors. (With a longer epilogue ptxas then finds a worse order for the loop.)
  static constexpr bool kDirect = kOperands == 0 && kScalars == 0;
  static constexpr int kBatches = kTileM / kBatchM;
  static constexpr int kElements = kBatchM * kWarpN / 32;  // of a lane in a batch
  // Of those, whose operands are loaded together: as many as leave no register to spill.
  static constexpr int kInFlight = kOperands < 2 ? 8 : kOperands < 4 ? 4 : kOperands < 8 ? 2 : 1;
  static constexpr int kPlaces = LinearResult::kFirstOperand + kOperands;
  static_assert(kElements % kInFlight == 0 && kBatches * kElements == 64);

  const LinearSplitArgs& args;
  Exchange& exchange;   // this warp's
  int warp_n;           // the warp's first row of the weight, in the tile
  uint32_t unsure = 0;  // of any tile; the same in the warp's lanes of one lane % 4
  bool was_strained = false;
  float bias[kDirect ? 2 : 1];  // of the tile's rows that the lane stores
  float fetched[kTileM / 32];   // on its way to exchange.x_unscale

  __device__ __forceinline__ float bias_of(int n) const {
    const float* from = args.result.bias;
    return from != nullptr && n < args.n ? from[n] : 0.0f;
  }

  // The warp's lanes find a place each, for all.
  __device__ __forceinline__ void find_places(const Plane& plane) const {
    const int i = min(static_cast<int>(threadIdx.x % 32), kPlaces - 1);
    exchange.place[i] = start_of(args.result.place[i], plane);
  }

  __device__ __forceinline__ void load(Values& in, int64_t m, int64_t n) const {
    in.load(args.result, [&](int i) { return exchange.place[i]; }, m, n);
  }

  __device__ __forceinline__ void store(const Values& in, int64_t m, int64_t n) const {
    linear_split::store<Epilogue, kScalars, Out>(
        args.result, in, [&](int i) { return exchange.place[i]; }, m, n);
  }

  // Element e of a lane's batch: for each e the warp has two rows of x and all 16 of its n.
  static __device__ __forceinline__ int row_of(int e, int lane) { return 2 * e + lane / kWarpN; }

  // Where in the tile is what a lane stores as its element 0...63?
  static __device__ __forceinline__ int m_of(int element, int lane) {
    return kDirect ? element / 4 * 8 + lane % 4 * 2 + element % 2
                   : element / kElements * kBatchM + row_of(element % kElements, lane);
  }
  __device__ __forceinline__ int n_of(int element, int lane) const {
    return warp_n + (kDirect ? lane / 4 + element / 2 % 2 * 8 : lane % kWarpN);
  }

  // Ahead of the tile's products, which hide the wait.
  __device__ __forceinline__ void begin(int index) {
    const Tile tile = tile_at(args, index);
    const int lane = threadIdx.x % 32;
    if constexpr (!kDirect) find_places(tile.at);
    const float* x_unscale = args.x_unscale + int64_t{tile.plane} * args.m;
    bias[0] = bias_of(tile.n + n_of(0, lane));
    if constexpr (kDirect) bias[1] = bias_of(tile.n + n_of(2, lane));
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      const int m = tile.m + i * 32 + lane;
      fetched[i] = m < args.m ? x_unscale[m] : 0.0f;
    }
  }

  __device__ __forceinline__ void place() {
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i)
      exchange.x_unscale[i * 32 + threadIdx.x % 32] = fetched[i];
    __syncwarp();
  }

  // Rows are named as by strained_rows. One that has a z that is not finite is done again whole.
  __device__ __forceinline__ void operator()(int index, const float (&sum)[64], uint32_t strained) {
    uint32_t rows;
    if constexpr (kDirect) {
      if (args.result.place[LinearResult::kZ].data != nullptr) {
        rows = store_as_it_lies<true>(tile_at(args, index), sum);
      } else {
        rows = store_as_it_lies<false>(tile_at(args, index), sum);
      }
      rows = in_any_lane(rows);
    } else {
      rows = store_in_runs(tile_at(args, index), sum);
    }
    rows |= strained;
    if (threadIdx.x % 32 < 4) args.unsure[place_of(index)] = rows;
    unsure |= rows;
    was_strained |= strained != 0;
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
  static __device__ __forceinline__ uint32_t rows_of(uint64_t elements) {
    if (!__any_sync(0xFFFFFFFF, elements != 0)) return 0;
    uint32_t rows = 0;
#pragma unroll 1
    for (int element = 0; element < 64; ++element) {
      const uint32_t lanes = __ballot_sync(0xFFFFFFFF, elements >> element & 1);
      if (element % 4 != threadIdx.x % 4) continue;  // of rows 8i + 2 (element % 4) + t
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (lanes >> t * kWarpN & 0xFFFF) rows |= 1u << (element / 4 * 2 + t);
      }
    }
    return rows;
  }

  // Without branches an element, each of which would wait for the one before: all is computed, what
  // lies inside is stored.
  template <bool kKeepsZ>
  __device__ __forceinline__ uint32_t store_as_it_lies(Tile tile, const float (&sum)[64]) const {
    uint32_t broken = 0;
    const int lane = threadIdx.x % 32;
    const int m0 = m_of(0, lane);
    const int rows = args.m - (tile.m + m0);
    const int n = tile.n + n_of(0, lane);
    const bool has_column[2] = {n < args.n, n + 8 < args.n};
    const LinearResult& to = args.result;
    Out* out = static_cast<Out*>(start_of(to.place[LinearResult::kOut], tile.at)) +
               (tile.m + m0) * to.out_stride + n;
    float* z = nullptr;
    if constexpr (kKeepsZ) {
      z = static_cast<float*>(start_of(to.place[LinearResult::kZ], tile.at)) +
          (tile.m + m0) * to.z_stride + n;
    }
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i0 = 0; i0 < 16; i0 += kAtOnce) {
      float2 unscale[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        unscale[i] = *reinterpret_cast<const float2*>(&exchange.x_unscale[m0 + 8 * (i0 + i)]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int element = 4 * (i0 + i) + 2 * r + t;
            Values in;
            in.value[0] = fmaf(sum[element], t ? unscale[i].y : unscale[i].x, bias[r]);
            const bool inside = 8 * (i0 + i) + t < rows && has_column[r];
            const Out result = result_of<Epilogue, kScalars, Out>(to, in);
            if (inside) out[t * to.out_stride + 8 * r] = result;
            if (kKeepsZ && inside) z[t * to.z_stride + 8 * r] = in.value[0];
            broken |= static_cast<uint32_t>(inside && !isfinite(in.value[0])) << (2 * (i0 + i) + t);
          }
        }
        out += 8 * to.out_stride;
        if (kKeepsZ) z += 8 * to.z_stride;
      }
    }
    return broken;
  }

  // Batch by batch through shared memory, so that a warp reads and writes runs of n.
  __device__ __forceinline__ uint32_t store_in_runs(Tile tile, const float (&sum)[64]) const {
    uint64_t broken = 0;
    const int lane = threadIdx.x % 32;
    const int n = tile.n + n_of(0, lane);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int first_m = tile.m + batch * kBatchM;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        exchange.z[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 % 2 * 8] =
            sum[batch * kElements + i];
      }
      __syncwarp();
#pragma unroll 1
      for (int e0 = 0; e0 < kElements; e0 += kInFlight) {
        Values in[kInFlight];
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) {
          const int m = first_m + row_of(e0 + e, lane);
          if (m < args.m && n < args.n) {
            in[e].value[0] =
                fmaf(exchange.z[row_of(e0 + e, lane)][lane % kWarpN],
                     exchange.x_unscale[batch * kBatchM + row_of(e0 + e, lane)], bias[0]);
            load(in[e], m, n);
          }
        }
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) {
          const int m = first_m + row_of(e0 + e, lane);
          if (m < args.m && n < args.n) {
            store(in[e], m, n);
            if (!isfinite(in[e].value[0])) broken |= uint64_t{1} << (batch * kElements + e0 + e);
          }
        }
      }
      __syncwarp();
    }
    return rows_of(broken);
  }

  static __device__ __forceinline__ int64_t place_of(int index) {
    return int64_t{index} * kLinearUnsureWords + threadIdx.x / 32 * 4 + threadIdx.x % 4;
  }

  // A lane's elements that are in unsure rows.
  __device__ __forceinline__ uint64_t unsure_elements(int index) const {
    const uint32_t rows = args.unsure[place_of(index)];
    if (!__any_sync(0xFFFFFFFF, rows != 0)) return 0;
    const int lane = threadIdx.x % 32;
    const Tile tile = tile_at(args, index);
    uint64_t elements = 0;
#pragma unroll 1
    for (int element = 0; element < 64; ++element) {
      const int m = m_of(element, lane);
      const uint32_t of_lane = __shfl_sync(0xFFFFFFFF, rows, m / 2 % 4);
      const uint64_t is_unsure = of_lane >> (m / 8 * 2 + m % 2) & 1;
      if (tile.m + m < args.m && tile.n + n_of(element, lane) < args.n) {
        elements |= is_unsure << element;
      }
    }
    return elements;
  }

  // After all tiles: divergent code within the loop over them would cost ptxas its knowledge that
  // the stages' addresses are uniform, and descriptors would then reach each wgmma through R2UR.
  __device__ __forceinline__ void repair() const {
    if (was_strained) *args.was_strained = 1;
    if (!__any_sync(0xFFFFFFFF, unsure != 0)) return;
    __syncwarp();  // the rows are read by other lanes than wrote them
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
      repair(tile_at(args, index), unsure_elements(index));
    }
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
      const float product = plain_product(args, tile.at, m, n);
      if (lane == owner) {
        Values in;
        in.value[0] = product + bias_of(n);
        load(in, m, n);
        store(in, m, n);
        elements &= elements - 1;
      }
    }
  }
};

}  // namespace fx_fuser::linear_split
