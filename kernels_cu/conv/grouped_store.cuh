// The grouped convolution (grouped.cuh): from a warp's sums through the epilogue to global memory.
#pragma once

#include <utility>

#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "conv/grouped_load.cuh"

namespace fx_fuser::grouped {

constexpr int kQuad = 4;  // channels that a lane computes at once

// sum[m][t][2r + i] is the job's pixel 16m + 8r + lane / 4, channel 8t + 2 (lane % 4) + i.
template <class S>
using Sums = float[kGroupedRows][S::kJobTiles][4];

// A pixel of the result.
struct Pixel {
  int sample;
  int row;
  int column;

  static __device__ __forceinline__ Pixel of(const Corner& corner, uint32_t position) {
    return {corner.image + static_cast<int>(position >> kGroupedImageAt),
            corner.row + static_cast<int>(position >> kGroupedLineAt) % kGroupedMostLines,
            corner.column + static_cast<int>(position) % kGroupedMostLines};
  }
};

// A tile of the result.
struct Target {
  Corner corner;
  uint32_t limit;  // the last position that exists
  int64_t to;      // where its first pixel is, in elements

  static __device__ __forceinline__ Target of(const GroupedArgs& args, int tile) {
    const Corner corner = Corner::of(args, tile);
    return {corner, corner.limit(args),
            corner.image * args.out_stride[0] + corner.row * args.out_stride[1] +
                corner.column * args.out_stride[2]};
  }
};

// Where a weight of 0 stands for another group's, an infinity of that group makes NaN. What is NaN
// is computed again from its own group.
template <class X>
__device__ __noinline__ float exact_sum(const GroupedArgs& args, Pixel pixel, int channel) {
  const int group = channel / args.group_outputs;
  const int first = group * args.group_inputs;
  const auto* x = static_cast<const X*>(args.x);
  const auto* weight = static_cast<const X*>(args.weight) + group * args.weight_group +
                       channel % args.group_outputs * args.weight_stride[0];
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < args.kernel_h; ++i) {
    const int row = pixel.row * args.stride[0] - args.top + i * args.dilation[0];
#pragma unroll 1
    for (int j = 0; j < args.kernel_w; ++j) {
      const int column = pixel.column * args.stride[1] - args.left + j * args.dilation[1];
      const bool is_inside = is_below(row, args.h) && is_below(column, args.w);
      const int at =
          pixel.sample * args.x_stride[0] + row * args.x_stride[1] + column * args.x_stride[2];
#pragma unroll 1
      for (int input = 0; input < args.group_inputs; ++input) {
        const int64_t from = int64_t{is_inside ? at : 0} * kGroupedVector + first + input;
        const float value = is_inside ? convert<float>(x[from]) : 0.0f;
        const int64_t of =
            i * args.weight_stride[2] + j * args.weight_stride[3] + input * args.weight_stride[1];
        sum = fmaf(value, convert<float>(weight[of]), sum);
      }
    }
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void store_quad(T* to, const float (&value)[kQuad]) {
  *reinterpret_cast<Packed<T, kQuad>*>(to) = pack<T>(value);
}

// Copies a leaf, one number per channel, to shared memory as fp32: [leaf][row of weights].
template <class S, int kLeaf, class T>
__device__ __forceinline__ void stage_leaf(const GroupedArgs& args, uint8_t* storage) {
  if constexpr (kLeaf < S::kLeaves) {
    const ConvOperand& operand = args.operand[kLeaf].of;
    const int rows = rows_of<S>(args);
    const auto* channels = reinterpret_cast<const int32_t*>(storage + args.channels_at);
    auto* leaves = reinterpret_cast<float*>(storage) + kLeaf * rows;
    for (int i = static_cast<int>(threadIdx.x); i < rows; i += kGroupedThreads) {
      const int64_t channel = max(channels[i], 0);
      leaves[i] = convert<float>(static_cast<const T*>(operand.data)[channel * operand.stride[1]]);
    }
  }
}

template <class S, class Epilogue, int kScalars, class Operands, class... In>
struct Tail;

// The epilogue. Operands after the leaves vary by pixel.
template <class S, class Epilogue, int kScalars, size_t... kOperand, class... In>
struct Tail<S, Epilogue, kScalars, std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static constexpr int kPitch = grouped_stage_pitch(S::kJobTiles);
  static constexpr int kQuads = S::kJobChannels / kQuad;
  static constexpr int kAtOnce = 32 / kQuads;  // pixels
  static constexpr int kPasses = (kGroupedRow + kAtOnce - 1) / kAtOnce;
  static_assert(kOperands <= kGroupedMaxOperands && kScalars <= kMaxScalars);
  static_assert(kOperands >= S::kLeaves && kOperands - S::kLeaves <= kGroupedMaxOthers);
  using Vectors = PackedVectors<std::index_sequence<kOperand...>, kQuad, In...>;

  const GroupedArgs& args;
  uint8_t* storage;

  __device__ __forceinline__ void stage() const {
    (stage_leaf<S, kOperand, In>(args, storage), ...);
  }

  template <int kIndex, class T>
  __device__ __forceinline__ void load(const Pixel& pixel, int channel, Vectors& vectors) const {
    if constexpr (kIndex >= S::kLeaves) {
      const GroupedOperand& operand = args.operand[kIndex];
      const int64_t (&stride)[4] = operand.of.stride;
      const T* from = static_cast<const T*>(operand.of.data) + pixel.sample * stride[0] +
                      pixel.row * stride[2] + pixel.column * stride[3] + channel * stride[1];
      auto& packed = vector_of<kIndex>(vectors);
      if (operand.takes_vectors) {
        packed = *reinterpret_cast<const Packed<T, kQuad>*>(from);
      } else {
        packed.assign([&](int e) { return from[e * stride[1]]; });
      }
    }
  }

  // One of a job's rows of products, which the warp puts into its stage to have the channels of a
  // pixel side by side. Without branches, so that what an epilogue makes of leaves alone is made
  // once.
  __device__ __forceinline__ void finish_row(
      const Target& target, const Place* place, int channel,
      const float (&leaf)[S::kLeaves > 0 ? S::kLeaves : 1][kQuad],
      const float (&sum)[S::kJobTiles][4], float* stage) const {
    const auto lane = static_cast<int>(ptx::thread_index() % 32);
#pragma unroll
    for (int t = 0; t < S::kJobTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* to = stage + (lane / 4 + 8 * r) * kPitch + 8 * t + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sum[t][2 * r], sum[t][2 * r + 1]);
      }
    }
    __syncwarp();
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = min(lane / kQuads + pass * kAtOnce, kGroupedRow - 1);
      const bool is_new =
          (pass + 1) * kAtOnce <= kGroupedRow || lane / kQuads + pass * kAtOnce < kGroupedRow;
      const Place mine = place[at];
      const bool exists = is_new && channel >= 0 && is_within(mine.position, target.limit);
      const float4 four =
          *reinterpret_cast<const float4*>(stage + at * kPitch + lane % kQuads * kQuad);
      float z[kQuad] = {four.x, four.y, four.z, four.w};
      const Pixel pixel = Pixel::of(target.corner, exists ? mine.position : 0);
      if constexpr (S::kMixed) {
#pragma unroll
        for (int e = 0; e < kQuad; ++e) {
          if (exists && isnan(z[e])) z[e] = exact_sum<typename S::X>(args, pixel, channel + e);
        }
      }
      Vectors vectors;
      (load<kOperand, In>(pixel, max(channel, 0), vectors), ...);
      const auto value_of = [&](auto packed, int index, int e) {
        return index < S::kLeaves ? leaf[index < S::kLeaves ? index : 0][e]
                                  : convert<float>(packed[e]);
      };
      float value[kQuad];
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        const float in[1 + kOperands] = {z[e],
                                         value_of(vector_of<kOperand>(vectors), kOperand, e)...};
        value[e] = static_cast<float>(Epilogue{}(in, scalar));
      }
      const int64_t to = target.to + channel + mine.to;
      if (exists && args.c != nullptr) store_quad(static_cast<typename S::X*>(args.c) + to, z);
      if (exists) store_quad(static_cast<typename S::Out*>(args.out) + to, value);
    }
    __syncwarp();
  }

  // row: the job's first row of weights. batch: its rows of products.
  __device__ __forceinline__ void finish(const Target& target, int batch, int row,
                                         const Sums<S>& sum) const {
    const auto thread = static_cast<int>(ptx::thread_index());
    const int lane = thread % 32;
    const int mine = row + lane % kQuads * kQuad;
    const int rows = rows_of<S>(args);
    auto* stage = reinterpret_cast<float*>(storage + args.stage_at + thread / 32 * S::kStageBytes);
    const auto* leaves = reinterpret_cast<const float*>(storage) + mine;
    const bool works = lane < kQuads * kAtOnce;
    const int channel =
        works ? reinterpret_cast<const int32_t*>(storage + args.channels_at)[mine] : -1;
    float leaf[S::kLeaves > 0 ? S::kLeaves : 1][kQuad];
#pragma unroll
    for (int i = 0; i < S::kLeaves; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(leaves + i * rows);
      leaf[i][0] = four.x;
      leaf[i][1] = four.y;
      leaf[i][2] = four.z;
      leaf[i][3] = four.w;
    }
    const auto* place = reinterpret_cast<const Place*>(storage + args.places_at) +
                        batch * kGroupedRows * kGroupedRow;
#pragma unroll
    for (int m = 0; m < kGroupedRows; ++m) {
      finish_row(target, place + m * kGroupedRow, channel, leaf, sum[m], stage);
    }
  }
};

}  // namespace fx_fuser::grouped
