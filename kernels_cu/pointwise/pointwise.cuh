// out[...] = epilogue(in0[...], in1[...], ..., scalars), elementwise with broadcasting.
//
// A thread processes vectors of V consecutive elements of out's memory. For each operand it
// computes where the vector begins and loads raw elements (the anchor's first: they come from DRAM,
// the others often from a cache); only then does it convert, compute, round once and store. An
// element is stored only after all of its inputs are loaded, so out may be the anchor's own memory.
//
// The generated translation unit has one functor and one macro:
//
//   #include "pointwise/pointwise.cuh"
//   struct Epilogue {
//     template <class Acc>
//     __device__ Acc operator()(const Acc (&in)[2], const Acc (&scalar)[1]) const {
//       return fx_fuser::math::mul(fx_fuser::math::silu(in[0]), in[1]);
//     }
//   };
//   FX_FUSER_POINTWISE(Epilogue, /*scalars*/ 1, /*Acc*/ float, /*Out*/ float, /*In*/ float, float)
//
// `scalar` has at least one element, even if the epilogue has no scalar.
#pragma once

#include <utility>

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "pointwise/pointwise_args.h"

namespace fx_fuser {

template <class Index, int kInputs>
struct Place {
  Index offset[kInputs];  // of the element, in each operand
  Index inner;            // its coordinate along the innermost dimension
};

// The loop is rolled: most tensors have one to three dimensions left after coalescing, and an
// unrolled loop's dead code would take space in the instruction cache.
template <int kInputs, class Index>
__device__ __forceinline__ Place<Index, kInputs> locate(const PointwiseArgs<Index>& args,
                                                        Index index) {
  Place<Index, kInputs> place{};
  if (args.rank == 1) {  // all operands have out's layout, or are splats: usual for a Linear
    place.inner = index;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) place.offset[i] = index * args.stride[i][0];
    return place;
  }
#pragma unroll 1
  for (int d = 0; d < args.rank; ++d) {
    Index coordinate = index;
    if (d + 1 < args.rank) {
      index = divide(index, args.dim[d]);
      coordinate -= index * args.dim[d].size;
    }
    if (d == 0) place.inner = coordinate;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) place.offset[i] += coordinate * args.stride[i][d];
  }
  return place;
}

template <class T, int kWidth, class Index>
__device__ __forceinline__ void load_vector(Vec<T, kWidth>& raw, const void* in, Mode mode,
                                            Index offset, Index inner_stride) {
  const T* from = static_cast<const T*>(in) + offset;
  if (mode == Mode::kVector) {
    raw = *reinterpret_cast<const Vec<T, kWidth>*>(from);
  } else if (mode == Mode::kSplat) {
    const T value = *from;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) raw.element[e] = value;
  } else {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) raw.element[e] = from[e * inner_stride];
  }
}

template <class Index, bool kIsSmall, class Epilogue, int kScalars, class Acc, class Out,
          class Operands, class... In>
struct PointwiseKernel;

template <class Index, bool kIsSmall, class Epilogue, int kScalars, class Acc, class Out,
          size_t... kOperand, class... In>
struct PointwiseKernel<Index, kIsSmall, Epilogue, kScalars, Acc, Out,
                       std::index_sequence<kOperand...>, In...> {
  static constexpr int kInputs = sizeof...(In);
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static constexpr int kInputSize[] = {sizeof(In)...};
  static constexpr int kWidth = vector_width(sizeof(Out), kInputSize[0]);
  static constexpr int kVectors =
      kIsSmall ? 1 : vectors_in_flight(kWidth, kWidth * (0 + ... + int{sizeof(In)}));
  static constexpr int kThreads = kIsSmall ? kSmallThreads : kPointwiseThreads;
  static_assert(kInputs <= kMaxInputs && kScalars <= kMaxScalars);

  using Raw = VectorTuple<Vec, std::index_sequence<kOperand...>, kWidth, In...>;
  using Args = PointwiseArgs<Index>;

  template <int kOne>
  static __device__ __forceinline__ void load_operand(
      Raw (&raw)[kVectors], const Args& args, const Place<Index, kInputs> (&place)[kVectors],
      const bool (&whole)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (whole[v]) {
        load_vector(vector_of<kOne>(raw[v]), args.in[kOne], args.mode[kOne], place[v].offset[kOne],
                    args.stride[kOne][0]);
      }
    }
  }

  static __device__ __forceinline__ Vec<Out, kWidth> compute(Raw& raw,
                                                             const Acc (&scalar)[kScalarSlots]) {
    Vec<Out, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const Acc in[kInputs] = {convert<Acc>(vector_of<kOperand>(raw).element[e])...};
      result.element[e] = convert<Out>(static_cast<Acc>(Epilogue{}(in, scalar)));
    }
    return result;
  }

  static __device__ __forceinline__ void store(const Vec<Out, kWidth>& result, const Args& args,
                                               Index first) {
    Out* out = static_cast<Out*>(args.out) + first;
    if (args.out_is_aligned) {
      *reinterpret_cast<Vec<Out, kWidth>*>(out) = result;
      return;
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) out[e] = result.element[e];
  }

  // Element by element, for a vector that crosses into an operand's next row or past the end.
  static __device__ __forceinline__ void run_elements(const Args& args, Index first,
                                                      const Acc (&scalar)[kScalarSlots]) {
#pragma unroll 1
    for (Index index = first; index < first + kWidth && index < args.numel; ++index) {
      const auto place = locate<kInputs>(args, index);
      const Acc in[kInputs] = {
          convert<Acc>(static_cast<const In*>(args.in[kOperand])[place.offset[kOperand]])...};
      static_cast<Out*>(args.out)[index] = convert<Out>(static_cast<Acc>(Epilogue{}(in, scalar)));
    }
  }

  static __device__ __forceinline__ bool is_whole(const Args& args, Index first, Index inner) {
    return first + kWidth <= args.numel && inner + kWidth <= args.dim[0].size;
  }

  static __device__ __forceinline__ void run(const Args& args) {
    const Index vector = Index{blockIdx.x} * (kVectors * kThreads) + threadIdx.x;

    Index first[kVectors];
    Place<Index, kInputs> place[kVectors];
    bool whole[kVectors];
    bool all_whole = true;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      first[v] = (vector + v * kThreads) * kWidth;
      place[v] = locate<kInputs>(args, first[v]);
      whole[v] = is_whole(args, first[v], place[v].inner);
      all_whole &= whole[v];
    }

    Raw raw[kVectors];
    (load_operand<kOperand>(raw, args, place, whole), ...);

    Acc scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = static_cast<Acc>(args.scalar[s]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (whole[v]) store(compute(raw[v], scalar), args, first[v]);
    }
    if (all_whole) return;
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const Index begin = (vector + v * kThreads) * kWidth;
      if (!is_whole(args, begin, locate<kInputs>(args, begin).inner)) {
        run_elements(args, begin, scalar);
      }
    }
  }
};

template <bool kIsSmall, class Epilogue, int kScalars, class Acc, class Out, class... In,
          class Index>
__device__ __forceinline__ void pointwise(const PointwiseArgs<Index>& args) {
  PointwiseKernel<Index, kIsSmall, Epilogue, kScalars, Acc, Out, std::index_sequence_for<In...>,
                  In...>::run(args);
}

}  // namespace fx_fuser

// A minimum of one block per SM: without it ptxas spills to make room for a second one.
#define FX_FUSER_POINTWISE_KERNEL(name, Index, is_small, threads, ...)    \
  extern "C" __global__ void __launch_bounds__(threads, 1)                \
      name(const __grid_constant__ fx_fuser::PointwiseArgs<Index> args) { \
    fx_fuser::pointwise<is_small, __VA_ARGS__>(args);                     \
  }

// FX_FUSER_POINTWISE(Epilogue, scalars, Acc, Out, In...): u32 if every index and every offset fits
// in 31 bits, else u64. `small` has small blocks and one vector per thread: it spreads an output
// that is too small to fill the GPU over more SMs.
#define FX_FUSER_POINTWISE(...)                                                                   \
  FX_FUSER_POINTWISE_KERNEL(fx_fuser_pointwise_small, uint32_t, true, fx_fuser::kSmallThreads,    \
                            __VA_ARGS__)                                                          \
  FX_FUSER_POINTWISE_KERNEL(fx_fuser_pointwise_u32, uint32_t, false, fx_fuser::kPointwiseThreads, \
                            __VA_ARGS__)                                                          \
  FX_FUSER_POINTWISE_KERNEL(fx_fuser_pointwise_u64, uint64_t, false, fx_fuser::kPointwiseThreads, \
                            __VA_ARGS__)
