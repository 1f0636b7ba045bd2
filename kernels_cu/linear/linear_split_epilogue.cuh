// The split product's epilogue: prefetches its operands, and repairs results that are not finite or
// not precise enough. Stores are in linear_split_store.cuh.
#pragma once

#include <utility>

#include "linear/linear_split_store.cuh"

namespace fx_fuser::linear_split {

// A warp computes x[m, :] weight[n, :]ᵀ of a plane in IEEE fp32.
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
    // A NaN stays a NaN: this exit makes tensors full of them fast.
    if (__any_sync(0xFFFFFFFF, isnan(sum))) return NAN;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  }
  return sum;
}

template <class Loop, class X, class Epilogue, int kScalars, class Out, class... In>
struct TileEpilogue : Store<Loop, Epilogue, kScalars, Out, In...> {
  using Base = Store<Loop, Epilogue, kScalars, Out, In...>;
  using Base::args;
  using Base::column_of;
  using Base::row_of;
  using Base::self;
  using Base::shared;
  using typename Base::Operands;
  using typename Base::Self;
  using typename Base::Values;

  Precision doubt = kSure;

  // Ahead of the tile's products, which hide the latency: copies factors and bias to shared memory
  // and prefetches operands to L2.
  __device__ __forceinline__ void begin(int index) const {
    const Tile tile = tile_at(args, index);
    const Self me = self();
    this->find_places(me, tile.at);
    const SplitRowFactors* x_factors = args.x_factors + int64_t{tile.plane} * args.m;
#pragma unroll
    for (int i = 0; i < kTileM; i += 32) {
      const int m = tile.m + i + me.lane;
      const bool inside = m < args.m;
      ptx::copy_async(ptx::shared_address(&me.exchange.x_factors[i + me.lane]),
                      x_factors + (inside ? m : 0), inside);
    }
    const float* bias = args.result.bias;
    if (bias != nullptr) {
      const int columns = column_of(args.m, args.n);
      const int first = column_of(tile.m, tile.n + me.n);
      for (int i = me.lane; i < column_of(kTileM, kWarpN); i += 32) {
        const bool inside = first + i < columns;
        ptx::copy_async(ptx::shared_address(&me.exchange.bias[i]), bias + (inside ? first + i : 0),
                        inside);
      }
    }
    __syncwarp();
    prefetch(me, tile, Operands{});
  }

  template <size_t... kOperand>
  __device__ __forceinline__ void prefetch(const Self& me, const Tile& tile,
                                           std::index_sequence<kOperand...>) const {
    (prefetch_operand<In>(me, tile, kOperand), ...);
  }

  // A lane's prefetch covers 64 bytes of 4-byte elements.
  template <class T>
  __device__ __forceinline__ void prefetch_operand(const Self& me, const Tile& tile, int i) const {
    const int place = LinearResult::kFirstOperand + i;
    const OperandStride stride = args.result.operand[i];
    if (!args.result.is_vector(place) || stride.m == 0) return;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int m =
          tile.m + (args.transposed ? (me.lane / 16 + 2 * part) * 16 : part * 32 + me.lane);
      const int n = tile.n + me.n + (args.transposed ? me.lane % 16 : 0);
      if (m >= args.m || n >= args.n) continue;
      const int64_t at = row_of(m, n) * stride.m + column_of(m, n);
      ptx::prefetch(static_cast<const T*>(me.exchange.place[place]) + at);
    }
  }

  // Waits until begin()'s copies have arrived.
  __device__ __forceinline__ void ready() const {
    ptx::copy_async_wait();
    __syncwarp();
  }

  // For x's row i of the tile: see imprecise_rows.
  __device__ __forceinline__ float least_sum(int i) const {
    return shared.exchange[threadIdx.x / 32].x_factors[i].least_sum;
  }

  // imprecise, weights: as returned by imprecise_rows and imprecise_weights. A row of x with a z
  // that is not finite is repaired as a whole.
  __device__ __forceinline__ void operator()(int index, const float (&sum)[64], uint32_t imprecise,
                                             uint32_t weights) {
    const Tile tile = tile_at(args, index);
    const Self me = self();
    const float probe = this->store_tile(me, tile, sum);
    uint32_t rows = imprecise;
    if (__any_sync(0xFFFFFFFF, probe != 0)) rows |= this->broken_rows(me, tile, sum);
    if (me.lane < kLinearUnsureWords) unsure_rows(index)[me.lane] = me.lane < 4 ? rows : weights;
    if (__any_sync(0xFFFFFFFF, (rows | weights) != 0)) {
      const bool is_imprecise = __any_sync(0xFFFFFFFF, (imprecise | weights) != 0);
      if (doubt != kImprecise) doubt = is_imprecise ? kImprecise : kUnsure;
    }
  }

  // This warp's words for a tile.
  __device__ __forceinline__ uint32_t* unsure_rows(int index) const {
    const int64_t warp = int64_t{index} * (kLinearConsumerThreads / 32) + threadIdx.x / 32;
    return args.unsure + warp * kLinearUnsureWords;
  }

  // A bit per element of this lane that is in an unsure row.
  __device__ __forceinline__ uint64_t unsure_elements(const Self& me, int index) const {
    const uint32_t rows = unsure_rows(index)[me.lane % 4];
    const uint32_t weights = unsure_rows(index)[kLinearUnsureWords - 1];
    if (!__any_sync(0xFFFFFFFF, (rows | weights) != 0)) return 0;
    const Tile tile = tile_at(args, index);
    uint64_t elements = 0;
#pragma unroll 1
    for (int element = 0; element < 64; ++element) {
      const int m = me.m_of(element);
      const uint32_t of_lane = __shfl_sync(0xFFFFFFFF, rows, m / 2 % 4);
      const uint64_t is_unsure =
          (of_lane >> (m / 8 * 2 + m % 2) | weights >> (me.lane / 4 * 4 + element / 2 % 2)) & 1;
      if (tile.m + m < args.m && tile.n + me.n_of(element) < args.n) {
        elements |= is_unsure << element;
      }
    }
    return elements;
  }

  // After all tiles: with divergent code in the loop over tiles, ptxas no longer knows that the
  // stages' addresses are uniform, and passes descriptors to each wgmma through R2UR.
  __device__ __forceinline__ void repair() const {
    __syncwarp();  // other lanes wrote the rows that a lane reads
    if (doubt == kSure) return;
    const Self me = self();
    const int64_t ended = clock64();
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
      repair(me, tile_at(args, index), unsure_elements(me, index));
    }
    // One warp is enough to report: the kernel takes as long as its slowest warp.
    const auto product = static_cast<float>(ended - shared.began);
    const auto repairs = static_cast<float>(clock64() - ended);
    const float times = repairs / (args.bearable * product);
    if (doubt == kImprecise && times > 1)
      *args.precision_flag = static_cast<uint32_t>(fminf(times, 1000));
  }

  // The warp repairs its lanes' elements one by one.
  __device__ __forceinline__ void repair(const Self& me, const Tile& tile,
                                         uint64_t elements) const {
    __syncwarp();  // the previous tile's places have been read
    this->find_places(me, tile.at);
    __syncwarp();
    while (const uint32_t lanes = __ballot_sync(0xFFFFFFFF, elements != 0)) {
      const int owner = __ffs(lanes) - 1;
      const int bit = __ffsll(__shfl_sync(0xFFFFFFFF, elements, owner)) - 1;
      const Self other{owner, me.n, me.exchange};
      const int m = tile.m + other.m_of(bit);
      const int n = tile.n + other.n_of(bit);
      const float product = plain_product<X>(args, tile.at, m, n);
      if (me.lane == owner) {
        Values in;
        const int column = column_of(m, n);
        const float* bias = args.result.bias;
        in.value[0] = bias != nullptr ? product + bias[column] : product;
        this->load(me, in, row_of(m, n), column);
        this->store(me, in, row_of(m, n), column);
        elements &= elements - 1;
      }
    }
  }
};

}  // namespace fx_fuser::linear_split
