// Philox4x32: random numbers as a function of a counter and a key (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once

#include <cstdint>

namespace fx_fuser {

// Seven rounds: the fewest that pass all of BigCrush, according to the paper. torch uses ten.
__device__ __forceinline__ uint4 philox(uint2 key, uint4 counter) {
  constexpr int kRounds = 7;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t first = uint64_t{counter.x} * 0xD2511F53u;
    const uint64_t second = uint64_t{counter.z} * 0xCD9E8D57u;
    counter = {
        static_cast<uint32_t>(second >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(first)};
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace fx_fuser
