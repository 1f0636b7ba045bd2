// What a split product's kernel may see of its data that makes another way the faster one.
#pragma once

#include <atomic>
#include <cstdint>

#include "shim_device.h"

namespace fx_fuser {
namespace {

// The kernel sets a word in the host's memory, and the next calls go the other way: nobody waits
// for anybody, and the first calls are slow, never wrong.
class Fallback {
 public:
  Fallback() {
    void* flag = nullptr;
    check(cudaHostAlloc(&flag, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc");
    flag_ = static_cast<uint32_t*>(flag);
    *flag_ = 0;
  }

  uint32_t* flag() const { return flag_; }

  // Is this call to go the other way?
  bool takes_call() {
    if (const volatile uint32_t* seen = flag_; *seen != 0) {
      *flag_ = 0;
      calls_left_ = kCalls;
    }
    // Not exact between threads, and need not be.
    if (calls_left_ <= 0) return false;
    --calls_left_;
    return true;
  }

  void reset() {
    *flag_ = 0;
    calls_left_ = 0;
  }

 private:
  static constexpr int kCalls = 1000;  // the slow ones are then a few per cent of the time
  uint32_t* flag_;
  std::atomic<int> calls_left_{0};
};

}  // namespace
}  // namespace fx_fuser
