// fp32 matrices to planes (linear_planes_args.h). The tensor cores keep ten bits behind the point
// of TF32, and of fp16, and multiply fp16 twice as fast; a power of two gives back the range.
//
// Two kernels: the largest value of each block's part, which whoever made the tensor may know, and
// the plane. A value of the plane is rounded to nearest, as cuBLAS rounds to TF32, while it is a
// normal number of fp16: 2^-29 of the largest and more. Whether any is below is noted, for
// linear_planes_repair.cuh to look at the sums. Infinities and NaN stay, and have no part in the
// scale.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/epilogue_math.cuh"
#include "linear/linear_planes_args.h"

namespace fx_fuser {

struct PlaneOctet {
  float4 half[2];
};

__device__ __forceinline__ PlaneOctet load_plane_octet(const PlaneArgs& args, uint32_t index) {
  const uint32_t line = divide(index, args.octets);
  const int64_t first = int64_t{index - line * args.octets.size} * kPlaneWidth;
  const float* from = args.from + line * args.pitch + first;
  if (args.vectors && first + kPlaneWidth <= args.columns) {
    const auto* vector = reinterpret_cast<const float4*>(from);
    return {vector[0], vector[1]};
  }
  const auto at = [&](int i) { return first + i < args.columns ? from[i] : 0.0f; };
  return {make_float4(at(0), at(1), at(2), at(3)), make_float4(at(4), at(5), at(6), at(7))};
}

// Calls visit(index, octet) for what a thread has of a plane, several loads ahead. The indices
// fall where `kFromTheEnd`: what the kernel before read last is still in the L2 cache.
template <bool kFromTheEnd, class Visit>
__device__ __forceinline__ void for_plane_octets(const PlaneArgs& args, Visit visit) {
  const uint32_t step = gridDim.x * kPlaneThreads;
  const uint32_t thread = blockIdx.x * kPlaneThreads + threadIdx.x;
#pragma unroll 1
  for (uint32_t first = thread; first < args.count; first += kPlaneInFlight * step) {
    PlaneOctet octet[kPlaneInFlight];
    const auto index_of = [&](int i) {
      const uint32_t index = first + i * step;
      return kFromTheEnd ? args.count - 1 - index : index;
    };
#pragma unroll
    for (int i = 0; i < kPlaneInFlight; ++i) {
      octet[i] = first + i * step < args.count ? load_plane_octet(args, index_of(i)) : PlaneOctet{};
    }
#pragma unroll
    for (int i = 0; i < kPlaneInFlight; ++i) {
      if (first + i * step < args.count) visit(index_of(i), octet[i]);
    }
  }
}

// Of all threads of the block, none negative; each gets it.
__device__ __forceinline__ float largest_of_block(float found) {
  __shared__ float of_warp[kPlaneThreads / 32];
  __syncthreads();  // all have read what is there of the last time
  for (int distance = 16; distance > 0; distance /= 2) {
    found = fmaxf(found, __shfl_xor_sync(0xFFFFFFFF, found, distance));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = found;
  __syncthreads();
  found = of_warp[0];
  for (int warp = 1; warp < kPlaneThreads / 32; ++warp) found = fmaxf(found, of_warp[warp]);
  return found;
}

__device__ __forceinline__ float largest_finite_of(const float4& v) {
  constexpr float kLargest = 0x1.fffffep127f;
  const auto size = [&](float one) { return fabsf(one) <= kLargest ? fabsf(one) : 0.0f; };
  return fmaxf(fmaxf(size(v.x), size(v.y)), fmaxf(size(v.z), size(v.w)));
}

__device__ __forceinline__ void plane_largest(const PlaneArgs& args) {
  float found = 0;
  for_plane_octets<false>(args, [&](uint32_t, const PlaneOctet& octet) {
    found = fmaxf(found, fmaxf(largest_finite_of(octet.half[0]), largest_finite_of(octet.half[1])));
  });
  found = largest_of_block(found);
  if (threadIdx.x == 0) args.facts->largest[blockIdx.x] = found;
}

// The power of two that brings the largest to [2^14, 2^15).
__device__ __forceinline__ int plane_exponent(float largest) {
  const uint32_t bits = __float_as_uint(largest);
  if (bits == 0) return 0;
  const int exponent = static_cast<int>(bits >> 23);
  // Of a subnormal number, by its highest bit, whose value is 2^(31 - 149) with no zeros ahead.
  return kPlaneTop - (exponent > 0 ? exponent - 127 : -118 - __clz(static_cast<int>(bits)));
}

// v 2^exponent, the exponent within [-252, 254], in two steps: neither leaves the range of floats
// where the result does not.
struct PowerOfTwo {
  float first;
  float second;

  static __device__ __forceinline__ PowerOfTwo of(int exponent) {
    const int half = exponent / 2;
    return {power(half), power(exponent - half)};
  }
  __device__ __forceinline__ float times(float v) const { return v * first * second; }

 private:
  static __device__ __forceinline__ float power(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
  }
};

__device__ __forceinline__ void plane_convert(const PlaneArgs& args) {
  constexpr float kLeastNormal = 0x1p-14f;
  float found = 0;
  for (int i = threadIdx.x; i < args.largest_count; i += kPlaneThreads) {
    found = fmaxf(found, args.largest[i]);
  }
  const int exponent = plane_exponent(largest_of_block(found));
  const auto scale = PowerOfTwo::of(exponent);
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    args.facts->exponent = exponent;
    args.facts->blocks = static_cast<int>(gridDim.x);
  }
  bool lost = false;
  for_plane_octets<true>(args, [&](uint32_t index, const PlaneOctet& octet) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4& v = octet.half[i / 2];
      const float a = i % 2 == 0 ? v.x : v.z;
      const float b = i % 2 == 0 ? v.y : v.w;
      const float scaled_a = scale.times(a);
      const float scaled_b = scale.times(b);
      lost |=
          (a != 0 && fabsf(scaled_a) < kLeastNormal) || (b != 0 && fabsf(scaled_b) < kLeastNormal);
      const __half2 both = __floats2half2_rn(scaled_a, scaled_b);
      word[i] = reinterpret_cast<const uint32_t&>(both);
    }
    reinterpret_cast<uint4*>(args.to)[index] = make_uint4(word[0], word[1], word[2], word[3]);
  });
  const bool any_lost = largest_of_block(lost ? 1.0f : 0.0f) > 0;
  if (threadIdx.x == 0) args.facts->lost[blockIdx.x] = any_lost;
}

}  // namespace fx_fuser
