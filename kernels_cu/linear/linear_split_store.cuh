// The split product: from a tile's sums through the epilogue to global memory.
#pragma once

#include <type_traits>
#include <utility>

#include "common/packed.cuh"
#include "linear/linear_split_result.cuh"
#include "linear/linear_split_tiles.cuh"

namespace fx_fuser::linear_split {

template <class Loop, class Epilogue, int kScalars, class Out, class... In>
struct Store {
  using Operands = std::index_sequence_for<In...>;
  using Values = Inputs<Operands, In...>;
  using Vectors = PackedVectors<Operands, kLinearVector, In...>;
  static constexpr int kOperands = sizeof...(In);
  // The host allocates partial sums so that they can always be stored in pairs.
  static constexpr bool kIsPartial = std::is_same_v<Epilogue, Partial>;
  // kDirect: results are stored directly from the accumulators' layout, in whole sectors. For
  // partial sums, and for epilogues with neither operands nor scalars, such as the plain products
  // over a short k of backward passes.
  // kMostWords: most registers for one vector of each operand. kWordsAhead: most registers for
  // vectors in flight, as far as the main loop can spare them. A kernel that spills is compiled
  // again with fewer (fx_fuser/native/jobs.py).
#ifdef FX_FUSER_FEW_REGISTERS
  static constexpr bool kDirect = kIsPartial;
  static constexpr int kMostWords = 8;
  static constexpr int kWordsAhead = Loop::kWordsAhead - 8;
#else
  static constexpr bool kDirect = kOperands == 0 && kScalars == 0;
  static constexpr int kMostWords = 16;
  static constexpr int kWordsAhead = Loop::kWordsAhead;
#endif
  static constexpr int kPlaces = LinearResult::kFirstOperand + kOperands;
  static constexpr int kBatches = kTileM / kBatchM;
  static constexpr int kElements = kBatchM * kWarpN / 32;  // per lane and batch
  static constexpr int kUnits = kElements / kLinearVector;
  static constexpr int kWords = (0 + ... + static_cast<int>(sizeof(In)));
  static constexpr int kAhead =
      kWords > kMostWords || kWords > kWordsAhead ? 1 : kWordsAhead / (kWords < 4 ? 4 : kWords);
  // Four at once. Not with an operand and few registers by mma.sync: it spills for sm_100a (NVRTC
  // 13.2).
  static constexpr bool kHasFour = kOperands == 0 || (kOperands == 1 && kWordsAhead >= 8);
  static constexpr int kElementsAhead = kHasFour ? 4 : kOperands < 8 ? 2 : 1;
  static_assert(kUnits * kLinearVector == kElements && kBatches * kElements == 64);
  static_assert(kElements % kElementsAhead == 0);

  const LinearSplitArgs& args;
  Shared& shared;

  // Derived from the thread's index: recomputed by each function, since the main loop has no
  // registers to keep it.
  struct Self {
    int lane;
    int n;  // the warp's first row of the weight, in the tile
    Exchange& exchange;

    // The row of x, and of the weight, of sum[element] in the tile.
    __device__ __forceinline__ int m_of(int element) const {
      return element / 4 * 8 + lane % 4 * 2 + element % 2;
    }
    __device__ __forceinline__ int n_of(int element) const {
      return n + lane / 4 + element / 2 % 2 * 8;
    }
  };
  __device__ __forceinline__ Self self() const {
    const auto thread = static_cast<int>(ptx::thread_index());
    return {thread % 32, thread / 32 * kWarpN, shared.exchange[thread / 32]};
  }

  // The result's row and column for x's row m and the weight's row n.
  __device__ __forceinline__ int row_of(int m, int n) const { return args.transposed ? n : m; }
  __device__ __forceinline__ int column_of(int m, int n) const { return args.transposed ? m : n; }

  // Each lane computes one place, for the whole warp.
  __device__ __forceinline__ void find_places(const Self& me, const Plane& plane) const {
    const int i = min(me.lane, kPlaces - 1);
    me.exchange.place[i] = start_of(args.result.place[i], plane);
  }

  __device__ __forceinline__ void load(const Self& me, Values& in, int64_t row,
                                       int64_t column) const {
    in.load(args.result, [&](int i) { return me.exchange.place[i]; }, row, column);
  }

  __device__ __forceinline__ void store(const Self& me, const Values& in, int64_t row,
                                        int64_t column) const {
    linear_split::store<Epilogue, kScalars, Out>(
        args.result, in, [&](int i) { return me.exchange.place[i]; }, row, column);
  }

  // Stores a tile's results. Returns NaN if a z is not finite, else zero.
  __device__ __forceinline__ float store_tile(const Self& me, const Tile& tile,
                                              const float (&sum)[64]) const {
    if constexpr (kDirect) {
      const bool keeps_z = args.result.place[LinearResult::kZ].data != nullptr;
      if (!kIsPartial && (keeps_z || (args.transposed && !args.pairs))) {
        return store_as_it_lies<Stores::kAny>(me, tile, sum);
      } else if (args.transposed) {
        return store_as_it_lies<Stores::kPairs>(me, tile, sum);
      } else {
        return store_as_it_lies<Stores::kRows>(me, tile, sum);
      }
    } else if (kWords <= kMostWords && args.result.is_in_vectors()) {
      return store_vectors(me, tile, sum, Operands{});
    } else {
      return store_elements(me, tile, sum);
    }
  }

  // The bias of sum[element]'s column of the result.
  __device__ __forceinline__ float bias_of(const Self& me, int element) const {
    if (args.result.bias == nullptr) return 0;
    return me.exchange.bias[column_of(me.m_of(element), me.n_of(element) - me.n)];
  }

  // A bit per row of x with a z that is not finite; the same in all lanes with the same lane % 4.
  __device__ __forceinline__ uint32_t broken_rows(const Self& me, const Tile& tile,
                                                  const float (&sum)[64]) const {
    uint32_t rows = 0;
#pragma unroll
    for (int element = 0; element < 64; ++element) {
      const int m = me.m_of(element);
      const float z = fmaf(sum[element], me.exchange.x_factors[m].unscale, bias_of(me, element));
      const bool inside = tile.m + m < args.m && tile.n + me.n_of(element) < args.n;
      rows |= static_cast<uint32_t>(inside && !isfinite(z)) << (element / 4 * 2 + element % 2);
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      rows |= __shfl_xor_sync(0xFFFFFFFF, rows, distance);
    }
    return rows;
  }

  enum class Stores { kRows, kPairs, kAny };
  struct alignas(2 * sizeof(Out)) Pair {
    Out value[2];
  };

  // No branch per element, each of which would wait for the previous one: everything is computed,
  // and stores are predicated. kRows: n are adjacent; kPairs: m are adjacent, and two can be stored
  // at once; kAny: everything else, and z.
  template <Stores kStores>
  __device__ __forceinline__ float store_as_it_lies(const Self& me, const Tile& tile,
                                                    const float (&sum)[64]) const {
    const int m0 = me.m_of(0);
    const int rows = args.m - (tile.m + m0);
    const int n = tile.n + me.n_of(0);
    const bool has_n[2] = {n < args.n, n + 8 < args.n};
    const bool transposed =
        kStores == Stores::kPairs || (kStores == Stores::kAny && args.transposed);
    const bool has_bias = args.result.bias != nullptr;
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
    const bool keeps_z = kStores == Stores::kAny && to.place[LinearResult::kZ].data != nullptr;
    if (keeps_z) z = reinterpret_cast<float*>(begin(LinearResult::kZ, z_m_step, z_n_step));
    const float bias_of_n[2] = {transposed ? 0 : bias_of(me, 0), transposed ? 0 : bias_of(me, 2)};
    float probe = 0;
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i0 = 0; i0 < 16; i0 += kAtOnce) {
      float2 unscale[kAtOnce];
      float2 bias_of_m[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int m = m0 + 8 * (i0 + i);
        const float4 both = *reinterpret_cast<const float4*>(&me.exchange.x_factors[m]);
        unscale[i] = make_float2(both.x, both.z);
        bias_of_m[i] = make_float2(0, 0);
        if (kStores != Stores::kRows && transposed && has_bias) {
          bias_of_m[i] = *reinterpret_cast<const float2*>(&me.exchange.bias[m]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Pair pair;
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const int element = 4 * (i0 + i) + 2 * r + t;
            const float of_m = kStores == Stores::kRows ? 0 : t ? bias_of_m[i].y : bias_of_m[i].x;
            Values in;
            in.value[0] = fmaf(sum[element], t ? unscale[i].y : unscale[i].x,
                               transposed ? of_m : bias_of_n[r]);
            const bool inside = 8 * (i0 + i) + t < rows && has_n[r];
            pair.value[t] = result_of<Epilogue, kScalars, Out>(to, in);
            if (kStores != Stores::kPairs && inside)
              out[t * m_step + 8 * r * n_step] = pair.value[t];
            if (keeps_z && inside) z[t * z_m_step + 8 * r * z_n_step] = in.value[0];
            probe = fmaf(in.value[0], 0.0f, probe);
          }
          if (kStores == Stores::kPairs && 8 * (i0 + i) < rows && has_n[r]) {
            *reinterpret_cast<Pair*>(out + 8 * r * n_step) = pair;
          }
        }
        out += 8 * m_step;
        if (keeps_z) z += 8 * z_m_step;
      }
    }
    return probe;
  }

  // Writes a batch's z to shared memory, in rows of the result.
  template <bool kTransposed>
  __device__ __forceinline__ void give_batch(const Self& me, int batch, const float (&sum)[64],
                                             const float (&bias_of_n)[2]) const {
    Exchange& exchange = me.exchange;
    const int n = me.lane / 4;
#pragma unroll
    for (int i = 0; i < kBatchM / 8; ++i) {
      const int m = 8 * i + 2 * (me.lane % 4);
      const SplitRowFactors* factors = &exchange.x_factors[batch * kBatchM + m];
      const float4 both = *reinterpret_cast<const float4*>(factors);
      float2 bias = make_float2(0, 0);
      if (kTransposed && args.result.bias != nullptr) {
        bias = *reinterpret_cast<const float2*>(&exchange.bias[batch * kBatchM + m]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* pair = &sum[batch * kElements + 4 * i + 2 * r];
        if constexpr (kTransposed) {
          const float2 z =
              make_float2(fmaf(pair[0], both.x, bias.x), fmaf(pair[1], both.z, bias.y));
          *reinterpret_cast<float2*>(&exchange.transposed_z[n + 8 * r][m]) = z;
        } else {
          exchange.z[m][n + 8 * r] = fmaf(pair[0], both.x, bias_of_n[r]);
          exchange.z[m + 1][n + 8 * r] = fmaf(pair[1], both.z, bias_of_n[r]);
        }
      }
    }
  }

  __device__ __forceinline__ void give_batch(const Self& me, int batch, const float (&sum)[64],
                                             const float (&bias_of_n)[2]) const {
    if (args.transposed) {
      give_batch<true>(me, batch, sum, bias_of_n);
    } else {
      give_batch<false>(me, batch, sum, bias_of_n);
    }
    __syncwarp();
  }

  // Positions of a lane's vectors, kUnits per batch. Within a batch they are in rows of the result
  // that are 8 rows of x, or 4 of the weight, apart; the next batch is 32 rows of x further.
  struct TilePlace {
    int row;
    int column;
    bool transposed;

    __device__ __forceinline__ int row_of(int u) const {
      return row + (transposed ? u % kUnits * 4 : u * 8);
    }
    __device__ __forceinline__ int column_of(int u) const {
      return column + (transposed ? u / kUnits * kBatchM : 0);
    }
    // With several operands, recomputed for each vector: there are no registers to keep the parts
    // of so many addresses.
    __device__ __forceinline__ char* address(void* place, int u, int64_t row_stride,
                                             int64_t column_stride, int size) const {
      int64_t r = row_of(u);
      int64_t c = column_of(u);
      if constexpr (kOperands > 1) {
        r = ptx::opaque(row_of(u));
        c = ptx::opaque(column_of(u));
      }
      return static_cast<char*>(place) + (r * row_stride + c * column_stride) * size;
    }
  };

  // Batch by batch through shared memory, so that a lane has four adjacent elements of a row.
  template <size_t... kOperand>
  __device__ __forceinline__ float store_vectors(const Self& me, const Tile& tile,
                                                 const float (&sum)[64],
                                                 std::index_sequence<kOperand...>) const {
    // In both layouts eight lanes read 128 bytes from all banks.
    static_assert(kTransposedPitch == 2 * kExchangePitch);
    const int lane = me.lane;
    Exchange& exchange = me.exchange;
    // Opaque, so that nothing derived from it is kept in registers through the main loop.
    const bool transposed = ptx::opaque(args.transposed);
    const int m = transposed ? lane % 8 * kLinearVector : lane / 8 + lane / 4 % 2 * 4;
    const int n = transposed ? lane / 8 : lane % 4 * kLinearVector;
    const float* z = transposed ? &exchange.transposed_z[n][m] : &exchange.z[m][n];
    const int rows = transposed ? args.n : args.m;
    const int columns = transposed ? args.m : args.n;
    const int first_m = tile.m + m;
    const int first_n = tile.n + me.n + n;
    const TilePlace place_of_tile{transposed ? first_n : first_m, transposed ? first_m : first_n,
                                  transposed};
    const auto is_inside = [&](int u) {
      return place_of_tile.row_of(u) < rows && place_of_tile.column_of(u) < columns;
    };
    const LinearResult& to = args.result;
    const bool keeps_z = to.place[LinearResult::kZ].data != nullptr;
    Vectors ahead[kAhead];
    const auto load = [&](int u) {
      if (!is_inside(u)) return;
      (load_vector(vector_of<static_cast<int>(kOperand)>(ahead[u % kAhead]),
                   place_of_tile.address(
                       exchange.place[LinearResult::kFirstOperand + static_cast<int>(kOperand)], u,
                       to.operand[kOperand].m, to.operand[kOperand].n, sizeof(In)),
                   to.is_vector(LinearResult::kFirstOperand + static_cast<int>(kOperand)),
                   to.operand[kOperand].n),
       ...);
    };
    if constexpr (kOperands > 0) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) load(u);
    }
    const float bias_of_n[2] = {bias_of(me, 0), bias_of(me, 2)};
    float probe = 0;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      give_batch(me, batch, sum, bias_of_n);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int u = batch * kUnits + unit;
        const float4 all = *reinterpret_cast<const float4*>(z + unit * 4 * kTransposedPitch);
        const float one[kLinearVector] = {all.x, all.y, all.z, all.w};
        Packed<Out, kLinearVector> made;
        made.assign([&](int e) {
          Values in;
          in.value[0] = one[e];
          ((in.value[1 + kOperand] =
                convert<float>(vector_of<static_cast<int>(kOperand)>(ahead[u % kAhead])[e])),
           ...);
          return result_of<Epilogue, kScalars, Out>(to, in);
        });
        if (is_inside(u)) {
          char* const to_out = place_of_tile.address(exchange.place[LinearResult::kOut], u,
                                                     to.out_stride, 1, sizeof(Out));
          *reinterpret_cast<Packed<Out, kLinearVector>*>(to_out) = made;
          if (keeps_z) {
            char* const to_z = place_of_tile.address(exchange.place[LinearResult::kZ], u,
                                                     to.z_stride, 1, sizeof(float));
            *reinterpret_cast<float4*>(to_z) = all;
          }
#pragma unroll
          for (const float value : one) probe = fmaf(value, 0.0f, probe);
        }
        if (kOperands > 0 && u + kAhead < kBatches * kUnits) load(u + kAhead);
      }
      __syncwarp();
    }
    return probe;
  }

  template <class T>
  static __device__ __forceinline__ void load_vector(Packed<T, kLinearVector>& packed,
                                                     const char* from, bool is_vector,
                                                     int64_t stride) {
    const T* first = reinterpret_cast<const T*>(from);
    if (is_vector) {
      packed = *reinterpret_cast<const Packed<T, kLinearVector>*>(from);
    } else {
      packed.assign([&](int e) { return first[e * stride]; });
    }
  }

  // The same element by element, for unaligned rows. A lane stays in its column; in each of its 16
  // steps the warp stores two rows of x by all 16 n, or one n by 32 rows of x.
  __device__ __forceinline__ float store_elements(const Self& me, const Tile& tile,
                                                  const float (&sum)[64]) const {
    const int lane = me.lane;
    Exchange& exchange = me.exchange;
    const bool transposed = args.transposed;
    const int rows = row_of(args.m, args.n);
    const int columns = column_of(args.m, args.n);
    const int step = transposed ? 1 : 2;
    const float* z =
        transposed ? &exchange.transposed_z[0][lane] : &exchange.z[lane / kWarpN][lane % kWarpN];
    const float bias_of_n[2] = {bias_of(me, 0), bias_of(me, 2)};
    float probe = 0;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int first_m = tile.m + batch * kBatchM + (transposed ? lane : lane / kWarpN);
      const int first_n = tile.n + me.n + (transposed ? 0 : lane % kWarpN);
      const int first_row = row_of(first_m, first_n);
      const int column = column_of(first_m, first_n);
      give_batch(me, batch, sum, bias_of_n);
#pragma unroll 1
      for (int e0 = 0; e0 < kElements; e0 += kElementsAhead) {
        Values in[kElementsAhead];
#pragma unroll
        for (int e = 0; e < kElementsAhead; ++e) {
          const int row = first_row + (e0 + e) * step;
          if (row < rows && column < columns) {
            in[e].value[0] = z[(e0 + e) * kTransposedPitch];
            load(me, in[e], row, column);
          }
        }
#pragma unroll
        for (int e = 0; e < kElementsAhead; ++e) {
          const int row = first_row + (e0 + e) * step;
          if (row < rows && column < columns) {
            store(me, in[e], row, column);
            probe = fmaf(in[e].value[0], 0.0f, probe);
          }
        }
      }
      __syncwarp();
    }
    return probe;
  }
};

}  // namespace fx_fuser::linear_split
