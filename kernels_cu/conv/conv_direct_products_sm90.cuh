// The direct convolution: the products of a unit's pixels with the weights of all taps, by wgmma.
#pragma once

#include "common/wgmma_sm90.cuh"
#include "conv/conv_direct_load_sm90.cuh"

namespace fx_fuser::conv_direct {

constexpr int kPart = 128;  // positions per instruction
constexpr int kUsualTaps = 9;
template <class X>
constexpr int kUsualSteps = kSplits<X> ? 14 : 5;  // of kUsualTaps

// Descriptor of a K-major operand without swizzle: core matrices of 8 rows of 16 bytes follow each
// other. `begin_and_leading` is from a ConvStep.
__device__ __forceinline__ uint64_t descriptor(uint32_t base, uint32_t begin_and_leading) {
  constexpr uint64_t kStrideOffset = 128 / 16;
  return kStrideOffset << 32 | (base + begin_and_leading);
}

// The descriptor of a step's pixels, from the slot's `pixels` on; both addresses in units of 16
// bytes.
template <class X>
__device__ __forceinline__ uint64_t descriptor_of_pixels(const ConvDirectArgs& args, int step,
                                                         int steps, uint32_t pixels,
                                                         uint32_t zeros) {
  const uint32_t of_step = args.step[step].pixels;
  if (!kSplits<X> && step == steps - 1 && of_step <= 0xFFFF) {
    return descriptor(zeros, (pixels + of_step - zeros) << 16);
  }
  return descriptor(pixels, of_step);
}

// For 3 x 3 taps in fp32: a thread's fragments of the hi weights, each used by two steps, kept in
// registers as wgmma's first operand. Those steps read a third less from shared memory.
struct KeptWeights {
  static constexpr int kCount = 4;
  static constexpr int kFirst = 5;  // step that uses them first; again kCount steps later
  uint32_t word[kCount][4];

  __device__ __forceinline__ void load(const ConvDirectArgs& args, const Shared& shared) {
    const int thread = threadIdx.x % kWarpgroup;
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const auto* from = reinterpret_cast<const uint32_t*>(shared.weight) + row * 4 + thread % 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t weight = args.step[kFirst + i].weight;
      const uint32_t* half = from + (weight & 0xFFFF) * 4;
      const uint32_t* other = half + (weight >> 16) * 4;
      word[i][0] = half[0];
      word[i][1] = half[8 * 4];
      word[i][2] = other[0];
      word[i][3] = other[8 * 4];
    }
  }

  static __device__ constexpr bool has(int step) {
    return step >= kFirst && step < kFirst + 2 * kCount;
  }
};
struct NoWeights {};

// Starts all taps' products for a part of a slot's positions, twice as many as a thread has sums.
// further: where the unit's pixels begin in the slot. kSteps: the number of steps, if known.
// sum[4i + 2r + t]: channel 16 warp + lane / 4 + 8r, position 8i + 2 (lane % 4) + t.
template <class X, int kSteps, int kSums, class Kept = NoWeights>
__device__ __forceinline__ void start_products(const ConvDirectArgs& args, const Shared& shared,
                                               int slot, int part, float (&sum)[kSums],
                                               [[maybe_unused]] const Kept& kept = {},
                                               int further = 0) {
  const uint32_t weight = ptx::uniform(ptx::shared_address(shared.weight) >> 4);
  const uint32_t pixels =
      ptx::uniform((ptx::shared_address(shared.slot) + slot * args.slot_bytes) / 16 +
                   part * (2 * kSums) + further);
  const uint32_t zeros = ptx::uniform(ptx::shared_address(shared.zeros) / 16);
  const int steps = kSteps > 0 ? kSteps : args.steps;
  ptx::pin(sum);
  const auto start = [&](int i) {
    const uint64_t of_pixels = descriptor_of_pixels<X>(args, i, steps, pixels, zeros);
    if constexpr (std::is_same_v<Kept, KeptWeights>) {
      if (Kept::has(i)) {
        ptx::WgmmaOfRegisters<__half>::run(sum, kept.word[(i - Kept::kFirst) % Kept::kCount],
                                           of_pixels, true);
        return;
      }
    }
    ptx::Wgmma<Factor<X>>::run(sum, descriptor(weight, args.step[i].weight), of_pixels, i > 0);
  };
  if constexpr (kSteps > 0) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) start(i);
    ptx::wgmma_commit();
  } else {
    // Fence and commit in each step: with only one pair around the loop, ptxas adds fences or
    // serialises.
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      ptx::wgmma_fence();
      start(i);
      ptx::wgmma_commit();
    }
  }
}

// For statistics, whose two product warpgroups take alternate slots of the ring: calls use(slot,
// part, sum) for each of the `parts` of 128 positions of the units from `first` on. One part's
// products run while another's sums are used.
template <class X, int kSteps, class Use>
__device__ __forceinline__ void multiply_units(const ConvDirectArgs& args, const Shared& shared,
                                               int first, int step, int parts,
                                               PipelineState pipeline, const Use& use) {
  Tail& tail = *shared.tail;
  if (first >= args.units) return;
  float sum[2][64];
  ptx::mbarrier_wait(ptx::shared_address(&tail.full[pipeline.slot]), pipeline.phase);
  start_products<X, kSteps>(args, shared, pipeline.slot, 0, sum[0]);
  int part = 0;
  for (int index = first; index < args.units;) {
    const int slot = pipeline.slot;
    const int even = part;
    ptx::wgmma_wait<0>();
    ptx::pin(sum[0]);
    start_products<X, kSteps>(args, shared, slot, even + 1, sum[1]);
    use(slot, even, sum[0]);
    ptx::wgmma_wait<0>();
    ptx::pin(sum[1]);
    part += 2;
    const bool is_last = part == parts;
    if (is_last) {
      part = 0;
      index += step;
      // After the last unit, one unused product is started below: a condition would make ptxas
      // serialise the products.
      if (index < args.units) {
        for (int i = 0; i < 2; ++i) pipeline.advance(args.slots);
        ptx::mbarrier_wait(ptx::shared_address(&tail.full[pipeline.slot]), pipeline.phase);
      }
    }
    start_products<X, kSteps>(args, shared, pipeline.slot, part, sum[0]);
    use(slot, even + 1, sum[1]);
    if (is_last) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot]));
    }
  }
  ptx::wgmma_wait<0>();
}

}  // namespace fx_fuser::conv_direct
