// What a split product's kernel may see of its data that makes another way the faster one.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "host/device.h"

namespace fx_fuser {
namespace {

// The kernel sets a word in the host's memory, and the next calls of the same sizes go the other
// way: nobody waits for anybody, and the first calls are slow, never wrong. Of the same sizes
// alone: one product of a net may have such data in every step, and the others none.
class Fallback {
 public:
  Fallback() {
    void* flags = nullptr;
    check(driver().MemHostAlloc(&flags, kSlots * sizeof(uint32_t),
                                kHostMemoryPortable | kHostMemoryMapped),
          "cuMemHostAlloc");
    flags_ = static_cast<uint32_t*>(flags);
    reset();
  }

  using Sizes = std::array<int64_t, 3>;  // that tell one product from another

  uint32_t* flag(const Sizes& sizes) const { return flags_ + slot(sizes); }

  // Is this call to go the other way?
  bool takes_call(const Sizes& sizes) { return takes_call_of(slot(sizes)); }

  void reset() {
    for (int i = 0; i < kSlots; ++i) {
      flags_[i] = 0;
      score_[i] = 0;
      calls_left_[i] = 0;
    }
  }

 private:
  static constexpr int kCalls = 1000;  // the slow ones are then a few per cent of the time
  static constexpr int kSlots = 64;
  static constexpr int kOfSlowCall = 4;  // and -1 of a call that was not
  static constexpr int kHighest = 64;

  static int slot(const Sizes& sizes) {
    uint64_t hash = 0;
    for (const int64_t size : sizes) {
      hash = (hash ^ static_cast<uint64_t>(size)) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 29;
    }
    return static_cast<int>(hash % kSlots);
  }

  bool takes_call_of(int i) {
    // Not exact between threads, and need not be.
    const auto seen = static_cast<int>(*static_cast<volatile uint32_t*>(flags_ + i));
    if (seen > 0) flags_[i] = 0;
    score_[i] = std::max(0, score_[i] + (seen > 0 ? kOfSlowCall * seen : -1));
    if (score_[i] >= kHighest) {
      score_[i] = 0;
      calls_left_[i] = kCalls;
    }
    if (calls_left_[i] <= 0) return false;
    --calls_left_[i];
    return true;
  }

  uint32_t* flags_;
  std::array<std::atomic<int>, kSlots> score_{};
  std::array<std::atomic<int>, kSlots> calls_left_{};
};

}  // namespace
}  // namespace fx_fuser
