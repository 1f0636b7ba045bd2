// Of the gemm from planes (linear_planes_sm90.cuh): which results are not trusted, and the kernel
// that computes those again from the fp32 matrices, without tensor cores.
#pragma once

#include "linear/linear_dense_sm90.cuh"
#include "linear/linear_planes_args.h"

namespace fx_fuser::dense {

__device__ __forceinline__ bool has_lost(const LinearPlanesArgs& args) {
  return (args.x_facts->lost | args.weight_facts->lost) != 0;
}

template <class Layout>
struct Doubts {
  static constexpr int kWords = doubt_words(Layout::kIs);
  static constexpr int kOfTile = doubts_of_tile(Layout::kIs);
};

// Where a lane of four has its words of a warp's subtile.
template <class Layout>
__device__ __forceinline__ int64_t first_doubt(int64_t block_of_tile, int warp, int subtile,
                                               int lane) {
  constexpr int kWords = Doubts<Layout>::kWords;
  return (((block_of_tile * 8 + warp) * Layout::kSubtiles + subtile) * 4 + lane) * kWords;
}

// A row of x in a warp's 16 rows of the weight is doubted where a thread's both sums of it are
// small. One alone is so by chance; zeros are what lost values leave, or rows of zeros.
template <class Layout>
__device__ __forceinline__ void note_doubts(
    const LinearPlanesArgs& args, int index,
    const float (&sum)[Layout::kSubtiles][Layout::kSumsOfSubtile]) {
  constexpr int kWords = Doubts<Layout>::kWords;
  static_assert(Layout::kSumsOfSubtile == 64 * kWords);
  const auto tile = Layout::tile_at(args, index);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < Layout::kSubtiles; ++j) {
    const int n =
        tile.n + (warp / 4 * Layout::kSubtiles + j) * kSubtileN + warp % 4 * 16 + lane / 4;
    uint32_t doubted[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      doubted[w] = 0;
#pragma unroll
      for (int bit = 0; bit < 32; ++bit) {
        const int i = 64 * w + bit / 2 * 4 + bit % 2;
        const float larger = fmaxf(fabsf(sum[j][i]), fabsf(sum[j][i + 2]));
        doubted[w] |= larger < args.least_sum ? 1u << bit : 0;
      }
      if (n >= args.n) doubted[w] = 0;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        doubted[w] |= __shfl_xor_sync(0xFFFFFFFF, doubted[w], distance);
      }
    }
    if (lane < 4) {
      const int64_t block = int64_t{index} * Layout::kCluster + Layout::rank();
      uint32_t* to = args.doubted + first_doubt<Layout>(block, warp, j, lane);
#pragma unroll
      for (int w = 0; w < kWords; ++w) to[w] = doubted[w];
    }
  }
}

template <class Epilogue, int kScalars, class Out, class Sequence, class... Operand>
struct PlainRow;

template <class Epilogue, int kScalars, class Out, size_t... kOperand, class... Operand>
struct PlainRow<Epilogue, kScalars, Out, std::index_sequence<kOperand...>, Operand...> {
  static constexpr int kColumns = 16;
  const LinearPlanesArgs& args;

  // Columns n...n + 15 of row m, by a warp. Were they computed? Zeros times anything finite are
  // what the sums were.
  __device__ __forceinline__ bool operator()(int m, int n) const {
    const int lane = threadIdx.x % 32;
    if (!has_values(m)) return false;
    const float* x = args.x + m * args.x_stride.m;
    float sum[kColumns] = {};
    for (int k = lane; k < args.k; k += 32) {
      const float value = x[k * args.x_stride.n];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (n + c >= args.n) continue;
        sum[c] = fmaf(value, args.weight[(n + c) * args.weight_stride.m + k * args.weight_stride.n],
                      sum[c]);
      }
    }
    float own = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      for (int distance = 16; distance > 0; distance /= 2) {
        sum[c] += __shfl_xor_sync(0xFFFFFFFF, sum[c], distance);
      }
      if (lane == c) own = sum[c];
    }
    if (lane < kColumns && n + lane < args.n) store(own, m, n + lane);
    __syncwarp();
    return true;
  }

 private:
  // A row of x that is not zeros alone.
  __device__ __forceinline__ bool has_values(int m) const {
    const float* x = args.x + m * args.x_stride.m;
    for (int first = 0; first < args.k; first += 32) {
      const int k = first + static_cast<int>(threadIdx.x) % 32;
      const float value = k < args.k ? x[k * args.x_stride.n] : 0.0f;
      if (__any_sync(0xFFFFFFFF, value != 0)) return true;
    }
    return false;
  }

  __device__ __forceinline__ void store(float sum, int64_t m, int64_t n) const {
    constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    const float bias = args.bias != nullptr ? static_cast<const float*>(args.bias)[n] : 0.0f;
    const auto operand = [&](int i, auto type) {
      const Strided<2>& from = args.operand[i];
      using T = decltype(type);
      return convert<float>(
          static_cast<const T*>(from.data)[m * from.stride[0] + n * from.stride[1]]);
    };
    const float in[1 + sizeof...(Operand)] = {sum + bias,
                                              operand(static_cast<int>(kOperand), Operand{})...};
    if (args.z != nullptr) static_cast<float*>(args.z)[m * args.z_stride + n] = in[0];
    static_cast<Out*>(args.out)[m * args.out_stride + n] =
        convert<Out>(static_cast<float>(Epilogue{}(in, scalar)));
  }
};

template <int kShape, class Epilogue, int kScalars, class Acc, class Out, class In,
          class... Operand>
__device__ __forceinline__ void repair(const LinearPlanesArgs& args) {
  static_assert(std::is_same_v<In, float>);
  if (!has_lost(args)) return;
  using Layout = dense::Layout<kShape>;
  constexpr int kWords = Doubts<Layout>::kWords;
  constexpr int kOfTile = Doubts<Layout>::kOfTile;
  const PlainRow<Epilogue, kScalars, Out, std::index_sequence_for<Operand...>, Operand...> row{
      args};
  const int lane = threadIdx.x % 32;
  const int64_t words = int64_t{args.tiles} * Layout::kCluster * kOfTile;
  const int64_t step = int64_t{gridDim.x} * kRepairThreads;
  int64_t repaired = 0;
  for (int64_t first = int64_t{blockIdx.x} * kRepairThreads + threadIdx.x / 32 * 32; first < words;
       first += step) {
    const uint32_t mine = first + lane < words ? args.doubted[first + lane] : 0;
    for (uint32_t any = __ballot_sync(0xFFFFFFFF, mine != 0); any != 0; any &= any - 1) {
      const int from = __ffs(static_cast<int>(any)) - 1;
      const int64_t place = first + from;
      const int64_t block = place / kOfTile;
      const int inside = static_cast<int>(place % kOfTile);
      const int w = inside % kWords;
      const int of_four = inside / kWords % 4;
      const int subtile = inside / kWords / 4 % Layout::kSubtiles;
      const int warp = inside / kWords / 4 / Layout::kSubtiles;
      const auto tile = Layout::tile_at(args, static_cast<int>(block / Layout::kCluster),
                                        static_cast<int>(block % Layout::kCluster));
      const int n = tile.n + (warp / 4 * Layout::kSubtiles + subtile) * kSubtileN + warp % 4 * 16;
      for (uint32_t bits = __shfl_sync(0xFFFFFFFF, mine, from); bits != 0; bits &= bits - 1) {
        const int bit = __ffs(static_cast<int>(bits)) - 1;
        const int m = tile.m + 8 * (16 * w + bit / 2) + 2 * of_four + bit % 2;
        if (m < args.m) repaired += row(m, n);
      }
    }
  }
  if (lane == 0 && repaired > args.bearable) {
    *args.precision_flag = static_cast<uint32_t>(min(repaired / args.bearable, int64_t{1000}));
  }
}

}  // namespace fx_fuser::dense
