// Lets a split product's kernel report data for which another way to compute it is faster.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "host/device.h"

namespace fx_fuser {
namespace {

// The kernel sets a word in mapped host memory, and later calls with the same sizes go the other
// way. There is no synchronisation: the first calls are slow, never wrong. It is per size because
// one product of a model may have such data in every step, and the others none.
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

  using Sizes = std::array<int64_t, 3>;  // identify a product

  uint32_t* flag(const Sizes& sizes) const { return flags_ + slot(sizes); }

  // True if this call should go the other way. Counts the call.
  bool takes_call(const Sizes& sizes) { return takes_call_of(slot(sizes)); }

  void reset() {
    for (int i = 0; i < kSlots; ++i) {
      flags_[i] = 0;
      score_[i] = 0;
      calls_left_[i] = 0;
    }
  }

 private:
  static constexpr int kCalls = 1000;  // slow calls then cost a few per cent of the time
  static constexpr int kSlots = 64;
  static constexpr int kOfSlowCall = 4;  // added per slow call; any other call subtracts 1
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
    // Races between threads only make the score inexact, which is harmless.
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
