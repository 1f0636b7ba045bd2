// The split product: from a sum to a stored result, for the product's kernels and for the one that
// adds up chunks of k.
#pragma once

#include <utility>

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/ptx.cuh"
#include "linear/linear_split_args.h"

namespace fx_fuser::linear_split {

__device__ __forceinline__ void* start_of(const LinearPlace& place, const Plane& plane) {
  return static_cast<char*>(place.data) + offset_of(plane, place.plane);
}

// What a chunk of k contributes, for sum_chunks.
struct Partial {
  template <class Acc>
  __device__ __forceinline__ Acc operator()(const Acc (&in)[1], const Acc (&)[1]) const {
    return in[0];
  }
};

template <class Sequence, class... In>
struct Inputs;

template <size_t... kOperand, class... In>
struct Inputs<std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static_assert(kOperands <= kMaxInputs);

  float value[1 + kOperands];  // z first

  // place(i): the address of the plane of LinearResult::place[i].
  template <class PlaceOf>
  __device__ __forceinline__ void load(const LinearResult& result, const PlaceOf& place, int64_t m,
                                       int64_t n) {
    ((value[1 + kOperand] = convert<float>(static_cast<const In*>(
          place(LinearResult::kFirstOperand +
                static_cast<int>(
                    kOperand)))[m * result.operand[kOperand].m + n * result.operand[kOperand].n])),
     ...);
  }
};

template <class Epilogue, int kScalars, class Out, class Values>
__device__ __forceinline__ Out result_of(const LinearResult& result, const Values& in) {
  static_assert(kScalars <= kMaxScalars);
  float scalar[kScalars > 0 ? kScalars : 1];
#pragma unroll
  for (int s = 0; s < (kScalars > 0 ? kScalars : 1); ++s) scalar[s] = result.scalar[s];
  return convert<Out>(static_cast<float>(Epilogue{}(in.value, scalar)));
}

template <class Epilogue, int kScalars, class Out, class Values, class PlaceOf>
__device__ __forceinline__ void store(const LinearResult& result, const Values& in,
                                      const PlaceOf& place, int64_t m, int64_t n) {
  if (result.place[LinearResult::kZ].data != nullptr) {
    static_cast<float*>(place(LinearResult::kZ))[m * result.z_stride + n] = in.value[0];
  }
  static_cast<Out*>(place(LinearResult::kOut))[m * result.out_stride + n] =
      result_of<Epilogue, kScalars, Out>(result, in);
}

// One element per thread. The order in which chunks are added depends on their number only.
template <class Epilogue, int kScalars, class Out, class... In>
__device__ __forceinline__ void sum_chunks(const LinearSumArgs& args) {
  ptx::wait_for_prerequisites();
  const uint32_t element = blockIdx.x * kSumThreads + threadIdx.x;
  if (element >= args.count) return;
  const uint32_t row = divide(element, args.n);
  const uint32_t n = element - row * args.n.size;
  const uint32_t batch = divide(row, args.m);
  const uint32_t m = row - batch * args.m.size;
  const uint32_t outer = divide(batch, args.inner);
  const Plane plane{0, static_cast<int>(outer), static_cast<int>(batch - outer * args.inner.size)};
  const auto place = [&](int i) { return start_of(args.result.place[i], plane); };

  Inputs<std::index_sequence_for<In...>, In...> in;
  in.load(args.result, place, m, n);
  const int64_t part_size = int64_t{args.rows} * args.pitch;
  const float* partial = args.partial + int64_t{row} * args.pitch + n;
  float sum = 0;
  for (int chunk = 0; chunk < args.chunks; chunk += kSumInFlight) {
    float part[kSumInFlight];
#pragma unroll
    for (int i = 0; i < kSumInFlight; ++i) {
      part[i] = chunk + i < args.chunks ? partial[(chunk + i) * part_size] : 0.0f;
    }
#pragma unroll
    for (int distance = 1; distance < kSumInFlight; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kSumInFlight; i += 2 * distance) part[i] += part[i + distance];
    }
    sum += part[0];
  }
  in.value[0] = args.result.bias != nullptr ? sum + args.result.bias[n] : sum;
  store<Epilogue, kScalars, Out>(args.result, in, place, m, n);
}

}  // namespace fx_fuser::linear_split
