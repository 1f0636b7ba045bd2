// The machine's parts: blocks with their shared memory, warps, and threads as fibers. For
// machine.cpp, which runs them, and calls.cpp, which kernels call.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "machine.h"
#include "memory.h"

namespace emulator {

inline constexpr int kLanes = 32;
constexpr size_t kStackBytes = 512 << 10;
// Addresses are below 2^18, as wgmma's descriptors require.
constexpr size_t kArenaBytes = 252 << 10;
constexpr size_t kArenaAlignment = 64 << 10;
constexpr uint32_t kFirstAddress = 1024;  // 0 is not a valid address
constexpr int kNamedBarriers = 16;

// ---- a block's shared memory --------------------------------------------------------------------

struct Variable {
  size_t offset;
  size_t bytes;
};

// Static variables are at the beginning; the dynamic part ends at a forbidden page.
struct Arena {
  unsigned char* base = nullptr;
  size_t used = 0;
  size_t dynamic = 0;  // where it begins
  size_t dynamic_bytes = 0;
  std::map<const void*, Variable> variables;

  void begin(size_t bytes) {
    if (base == nullptr) map();
    used = 0;
    variables.clear();
    dynamic_bytes = bytes;
    dynamic = (kArenaBytes - bytes) / 1024 * 1024;
    std::memset(base + dynamic, kNobodys, kArenaBytes - dynamic);
  }

  bool has(size_t offset, size_t bytes) const {
    if (offset >= dynamic) return offset + bytes <= dynamic + dynamic_bytes;
    for (const auto& [key, one] : variables) {
      if (offset >= one.offset && offset + bytes <= one.offset + one.bytes) return true;
    }
    return false;
  }

  // Whether something was written behind the dynamic part.
  bool is_overrun() const {
    const unsigned char* end = base + dynamic + dynamic_bytes;
    return std::any_of(end, static_cast<const unsigned char*>(base) + kArenaBytes,
                       [](unsigned char byte) { return byte != kNobodys; });
  }

 private:
  void map() {
    void* mapped = mmap(nullptr, kArenaBytes + 2 * kArenaAlignment, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const auto at = reinterpret_cast<uintptr_t>(mapped) + kArenaAlignment;
    base = reinterpret_cast<unsigned char*>(at / kArenaAlignment * kArenaAlignment);
    mprotect(base, kArenaBytes, PROT_READ | PROT_WRITE);
  }
};

// ---- threads ------------------------------------------------------------------------------------

enum class State { kReady, kWaits, kDone };

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint32_t reads;
  int group;
  uint64_t* arrives;  // null, or, instead of a copy: an arrival here after the copies before it
};

struct Warp;
struct Block;
struct Fiber;

// A TMA copy in flight, to a block's shared memory or from it.
struct Box {
  Fiber* of;  // the thread that issued it
  Where where;
  const void* map;
  uint32_t address;
  uint32_t barrier;
  uint32_t blocks;
  int at[4];
  int group;
};

struct Fiber {
  Thread thread;
  Warp* warp = nullptr;
  Block* block = nullptr;
  int lane = 0;
  State state = State::kDone;
  const char* waits_for = "";
  Where where{"", 0};
  const uint64_t* mbarrier = nullptr;  // that it waits for
  uint32_t parity = 0;
  bool arrived_in_cluster = false;
  unsigned cluster_phase = 0;  // of its arrival
  int group = 0;               // of copies
  std::vector<Copy> copies;    // in flight, in order
  int store_group = 0;         // of TMA's stores
  std::vector<Box> stores;     // in flight, in order

  bool is_alive = false;  // on its stack, ready for a kernel
  unsigned char* stack = nullptr;
  ucontext_t first;
  jmp_buf context;
};

// A warp-wide instruction that some of its lanes have reached.
struct Gathering {
  const char* what;
  Where where;
  uint32_t mask;
  uint32_t arrived = 0;
  void* data[kLanes] = {};
  Fiber* lanes[kLanes] = {};
};

// A warp's part of a wgmma, until it is waited for.
struct IssuedProduct {
  WarpgroupProduct product;
  Where where;
  int group;
  bool is_made = false;
  float* d[kLanes] = {};
  const uint32_t* a[kLanes] = {};
  // The values of d, [lane][register], which the registers do not have before the product is made.
  std::shared_ptr<std::vector<float>> sums;
};

struct Warp {
  int number;  // in its block
  std::vector<Fiber*> lanes;
  int ready = 0;
  std::vector<Gathering> gatherings;
  std::vector<IssuedProduct> products;  // in order
  int product_group = 0;
  bool is_fenced = false;   // whether it may issue products
  size_t instructions = 0;  // how many of its warpgroup's it has reached
};

// An instruction that all warps of a warpgroup must reach, in the same order.
struct WarpgroupInstruction {
  const char* what;
  Where where;
  uint64_t operand[3];
};

struct Barrier {
  int arrived = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  Dim index;
  unsigned rank = 0;  // in its cluster
  int alive = 0;
  Arena arena;
  Barrier all;
  Barrier some[kNamedBarriers];
  std::map<int, std::vector<WarpgroupInstruction>> warpgroups;
  std::map<int, int> registers;  // of a warpgroup's threads, by setmaxnreg
};

inline bool same(Where a, Where b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

inline std::string text_of(Where where) {
  const char* slash = std::strrchr(where.file, '/');
  return std::string(slash != nullptr ? slash + 1 : where.file) + ":" + std::to_string(where.line);
}

struct Machine {
  Launch launch{};
  Settings settings;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Fiber>> pool;  // with their stacks, reused by all launches
  std::vector<std::unique_ptr<Block>> block_pool;
  std::vector<Fiber*> fibers;  // of the cluster
  std::vector<Block*> blocks;
  std::vector<Warp> warps;
  unsigned cluster_arrived = 0;
  unsigned cluster_phase = 0;
  std::vector<Fiber*> waiting_for_cluster;
  std::vector<Fiber*> waiting_for_products;      // one per warp
  std::map<const uint64_t*, int64_t> bytes_due;  // per mbarrier; negative: not expected yet
  std::vector<Box> boxes;                        // in flight
  int alive = 0;
  int64_t ticks = 0;
  Fiber* current = nullptr;
  std::string error;
  jmp_buf scheduler;
  ucontext_t making;
};

inline Machine machine;

// ---- mbarriers ----------------------------------------------------------------------------------

// An mbarrier's state, in the kernel's own word.
struct Mbarrier {
  static constexpr uint32_t kMagic = 0xBA22;
  uint32_t magic;
  uint32_t phase;
  uint32_t expected;
  uint32_t pending;

  static Mbarrier of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 48), static_cast<uint32_t>(word >> 40 & 1),
            static_cast<uint32_t>(word >> 20 & 0xFFFFF), static_cast<uint32_t>(word & 0xFFFFF)};
  }
  uint64_t word() const {
    return uint64_t{magic} << 48 | uint64_t{phase} << 40 | uint64_t{expected} << 20 | pending;
  }
};

// ---- in machine.cpp -----------------------------------------------------------------------------

// Blocks this thread until make_ready is called for it.
void wait(const char* what, Where where);
void make_ready(Fiber& fiber);
void release(Barrier& barrier);
std::string name_of(const Fiber& fiber);

// Arrives at an mbarrier; false if there is none. Copies may arrive while no thread runs.
bool arrive(uint64_t* word);
bool arrive_bytes(uint64_t* word, int64_t bytes);

// When a thread has ended, and when all of the cluster have: checks for unfinished wgmma.
void check_end_of_thread(const Fiber& fiber);
std::string unfinished_warpgroup();

// ---- in tensor_copies.cpp -----------------------------------------------------------------------

void land_box(const Box& box);
void check_stores_at_end(const Fiber& fiber);

// Makes one copy, or the first `count` of a thread's copies.
void land(const Copy& copy);
void land_first(Fiber& fiber, size_t count);

}  // namespace emulator
