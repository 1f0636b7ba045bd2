// The implicit gemm (implicit.cuh): from a warp's sums through the epilogue to global memory.
#pragma once

#include <utility>

#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "conv/implicit_load.cuh"

namespace fx_fuser::implicit {

constexpr int kLanePixels = 4;  // eight rows of the tile apart
constexpr int kQuad = 4;        // channels that are computed at once

// d[m][t][2r + i] is the warp's row 16m + 8r + lane / 4 and, in a group of columns, channel
// 2 tiles (lane % 4) + 2t + i.
template <class S>
using Sums = float[2][S::kTiles][4];

// A lane's results in a group: pixels row, row + 8...; for each, kRun neighbouring channels, two
// from each of its tiles.
template <class S, int kGroup>
struct Lane {
  static constexpr int kTiles = S::tiles_of(kGroup);
  static constexpr int kRun = 2 * kTiles;
  static constexpr int kQuads = kRun / kQuad;
  int row;     // of the tile
  int column;  // of the tile
  int inside;  // the column in the group

  static __device__ __forceinline__ Lane self() {
    const int thread = static_cast<int>(ptx::thread_index());
    const int warp = thread / 32;
    const int inside = warp % 2 * 8 * kTiles + thread % 4 * kRun;
    return {warp / 2 * 8 * kLanePixels + thread % 32 / 4, kGroup * kImplicitGroupColumns + inside,
            inside};
  }
  // The warp's first column in the group.
  static __device__ __forceinline__ int warp_column() {
    return kGroup * kImplicitGroupColumns +
           static_cast<int>(ptx::thread_index()) / 32 % 2 * 8 * kTiles;
  }
};

// The results of a lane's pixels, stored in 16-byte vectors if the tensor allows it.
template <class S, int kGroup, class T>
struct Results {
  using L = Lane<S, kGroup>;
  Packed<T, kQuad> of[kLanePixels][L::kQuads];

  __device__ __forceinline__ void put(int pixel, int quad, const float (&value)[kQuad]) {
    of[pixel][quad] = pack<T>(value);
  }

  __device__ __forceinline__ void store(const ImplicitArgs& args, int tile, void* to,
                                        bool takes_vectors) const {
    const L lane = L::self();
    const int channel = first_channel<S>(args) + lane.column;
    const int present = args.outputs - channel;
    const bool whole = takes_vectors && present >= L::kRun;
#pragma unroll
    for (int p = 0; p < kLanePixels; ++p) {
      const int pixel = tile * kImplicitPixels + lane.row + 8 * p;
      if (pixel >= args.pixels) return;
      T* at = static_cast<T*>(to) + static_cast<int64_t>(pixel) * args.outputs + channel;
      if (!whole) {
#pragma unroll
        for (int e = 0; e < L::kRun; ++e) {
          if (e < present) at[e] = of[p][e / kQuad][e % kQuad];
        }
      } else if constexpr (sizeof(T) == 2 && L::kQuads == 2) {
        const auto& first = of[p][0].word;
        const auto& second = of[p][1].word;
        *reinterpret_cast<uint4*>(at) = make_uint4(first[0], first[1], second[0], second[1]);
      } else {
#pragma unroll
        for (int q = 0; q < L::kQuads; ++q) {
          *reinterpret_cast<Packed<T, kQuad>*>(at + kQuad * q) = of[p][q];
        }
      }
    }
  }
};

// Stores the convolution itself.
template <class S, int kGroup>
__device__ __forceinline__ void store_sums(const ImplicitArgs& args, int tile, const Sums<S>& sum) {
  using L = Lane<S, kGroup>;
  Results<S, kGroup, typename S::X> results;
#pragma unroll
  for (int p = 0; p < kLanePixels; ++p) {
#pragma unroll
    for (int q = 0; q < L::kQuads; ++q) {
      const float (&first)[4] = sum[p / 2][4 * kGroup + 2 * q];
      const float (&second)[4] = sum[p / 2][4 * kGroup + 2 * q + 1];
      const int r = p % 2 * 2;
      const float value[kQuad] = {first[r], first[r + 1], second[r], second[r + 1]};
      results.put(p, q, value);
    }
  }
  results.store(args, tile, args.c, args.c_takes_vectors);
}

// Copies a leaf, one number per channel, to shared memory as fp32: [leaf][column]. Channels beyond
// the last get the last one's value.
template <class S, int kLeaf, class T>
__device__ __forceinline__ void stage_leaf(const ImplicitArgs& args, float* leaves) {
  if constexpr (kLeaf < S::kLeaves) {
    const ConvOperand& operand = args.operand[kLeaf].of;
    const int first = first_channel<S>(args);
    for (int i = threadIdx.x; i < S::kColumns; i += kImplicitThreads) {
      const int64_t channel = min(first + i, args.outputs - 1);
      leaves[kLeaf * S::kColumns + i] =
          convert<float>(static_cast<const T*>(operand.data)[channel * operand.stride[1]]);
    }
  }
}

template <class S, class Epilogue, int kScalars, class Operands, class... In>
struct Tail;

// The epilogue. Operands after the leaves vary by pixel.
template <class S, class Epilogue, int kScalars, size_t... kOperand, class... In>
struct Tail<S, Epilogue, kScalars, std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static constexpr int kSlots = kOperands > 0 ? kOperands : 1;
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static constexpr int kOthers = kOperands - S::kLeaves;
  // Pixels whose operands are loaded at once.
  static constexpr int kAtOnce = kFewRegisters || kOthers > 1 ? 1 : 2;
  static_assert(kOperands <= kImplicitMaxOperands && kScalars <= kMaxScalars);
  static_assert(kOthers >= 0 && kOthers <= kImplicitMaxOthers);
  using Vectors = PackedVectors<std::index_sequence<kOperand...>, kQuad, In...>;

  const ImplicitArgs& args;
  const float* leaves;

  __device__ __forceinline__ void stage(float* to) const {
    (stage_leaf<S, kOperand, In>(args, to), ...);
  }

  // Waits for the operand's pieces of the group, which are next in the ring. at: where the lane's
  // elements of its first pixel begin.
  template <int kGroup, int kIndex, class T>
  __device__ __forceinline__ void find_piece(const Ring<S>& ring, int& slot, uint32_t& phase,
                                             uint32_t (&at)[kSlots]) const {
    at[kIndex] = 0;
    if (kIndex < S::kLeaves || args.operand[kIndex].mode != ImplicitMode::kRing) return;
    using L = Lane<S, kGroup>;
    constexpr int kBytes = 16 * L::kTiles * sizeof(T);  // of a pixel's group
    const L lane = L::self();
    const int byte = lane.inside * static_cast<int>(sizeof(T));
#pragma unroll
    for (int piece = 0; piece * kImplicitRow < kBytes; ++piece) {
      ring.wait(slot, phase);
      if (byte / kImplicitRow == piece) {
        const Part part{lane.row, byte % kImplicitRow / 16};
        at[kIndex] = ring.stage(slot) + part.piece_place() + byte % 16;
      }
      ring.advance(slot, phase);
    }
  }

  // Loads quad `quad` of the lane's channels, for pixels from `first` on.
  template <int kGroup, int kIndex, class T>
  __device__ __forceinline__ void load(int tile, int quad, int first, uint32_t at,
                                       Vectors (&vectors)[kAtOnce]) const {
    if constexpr (kIndex >= S::kLeaves) {
      using L = Lane<S, kGroup>;
      const ImplicitOperand& operand = args.operand[kIndex];
      if (operand.mode == ImplicitMode::kRing) {
        // A lane has 8, 16 or 32 bytes of a pixel: the second quad of 4-byte elements is in the
        // vector next to the first's.
        const uint32_t from = sizeof(T) == 4 ? at ^ quad * 16 : at + quad * kQuad * sizeof(T);
#pragma unroll
        for (int p = 0; p < kAtOnce; ++p) {
          load_shared(vector_of<kIndex>(vectors[p]), from + (first + p) * 8 * kImplicitRow);
        }
        return;
      }
      const L lane = L::self();
      const int channel = first_channel<S>(args) + lane.column + quad * kQuad;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        const int pixel = tile * kImplicitPixels + lane.row + 8 * (first + p);
        const Pixel place = Pixel::at(args, min(pixel, args.pixels - 1));
        const int64_t (&stride)[4] = operand.of.stride;
        const T* from = static_cast<const T*>(operand.of.data) + place.sample * stride[0] +
                        place.row * stride[2] + place.column * stride[3];
        auto& packed = vector_of<kIndex>(vectors[p]);
        if (operand.mode == ImplicitMode::kVectors) {
          from += min(channel, args.outputs - kQuad);
          packed = *reinterpret_cast<const Packed<T, kQuad>*>(from);
        } else {
          packed.assign(
              [&](int e) { return from[min(channel + e, args.outputs - 1) * stride[1]]; });
        }
      }
    }
  }

  template <class T>
  static __device__ __forceinline__ void load_shared(Packed<T, kQuad>& to, uint32_t from) {
    if constexpr (sizeof(T) == 4) {
      const float4 four = ptx::load_shared(from);
      const float word[kQuad] = {four.x, four.y, four.z, four.w};
      memcpy(&to, &word, sizeof(to));
    } else if constexpr (sizeof(T) == 2) {
      const uint2 both = ptx::load_shared_pair(from);
      to.word[0] = both.x;
      to.word[1] = both.y;
    }  // other sizes do not use the ring
  }

  template <int kGroup>
  __device__ __forceinline__ void run(int tile, const uint32_t (&at)[kSlots],
                                      const Sums<S>& sum) const {
    using L = Lane<S, kGroup>;
    const int column = L::self().column;
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    Results<S, kGroup, typename S::Out> results;
#pragma unroll
    for (int q = 0; q < L::kQuads; ++q) {
      float leaf[S::kLeaves > 0 ? S::kLeaves : 1][kQuad];
#pragma unroll
      for (int i = 0; i < S::kLeaves; ++i) {
        const float* from = leaves + i * S::kColumns + column + q * kQuad;
        const float4 four = *reinterpret_cast<const float4*>(from);
        leaf[i][0] = four.x;
        leaf[i][1] = four.y;
        leaf[i][2] = four.z;
        leaf[i][3] = four.w;
      }
      const auto value_of = [&](auto packed, int index, int e) {
        return index < S::kLeaves ? leaf[index < S::kLeaves ? index : 0][e]
                                  : convert<float>(packed[e]);
      };
#pragma unroll
      for (int first = 0; first < kLanePixels; first += kAtOnce) {
        Vectors vectors[kAtOnce];
        (load<kGroup, kOperand, In>(tile, q, first, at[kOperand], vectors), ...);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int p = first + i;
          float value[kQuad];
#pragma unroll
          for (int e = 0; e < kQuad; ++e) {
            const float z = sum[p / 2][4 * kGroup + 2 * q + e / 2][p % 2 * 2 + e % 2];
            const float in[1 + kOperands] = {
                z, value_of(vector_of<kOperand>(vectors[i]), kOperand, e)...};
            value[e] = static_cast<float>(Epilogue{}(in, scalar));
          }
          results.put(p, q, value);
        }
      }
    }
    results.store(args, tile, args.out, args.out_takes_vectors);
  }

  // The epilogue of all of the warp's groups; releases each group's pieces from the ring.
  template <int kGroup = 0>
  __device__ __forceinline__ void finish(Ring<S>& ring, int tile, const Sums<S>& sum) const {
    uint32_t at[kSlots];
    int slot = ring.slot;
    uint32_t phase = ring.phase;
    (find_piece<kGroup, kOperand, In>(ring, slot, phase, at), ...);
    if (first_channel<S>(args) + Lane<S, kGroup>::warp_column() < args.outputs) {
      if (args.c != nullptr) store_sums<S, kGroup>(args, tile, sum);
      run<kGroup>(tile, at, sum);
    }
#pragma unroll 1
    for (int i = 0; i < args.held[kGroup]; ++i) ring.pass();
    if constexpr (kGroup + 1 < S::kGroups) finish<kGroup + 1>(ring, tile, sum);
  }
};

}  // namespace fx_fuser::implicit
