// A CUDA multiprocessor on the CPU. It runs the blocks of one cluster at a time, each thread as a
// fiber. Fibers run one at a time, until they wait for others.
//
// Compiled kernels call this through device/prelude.h and device/common/ptx.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator {

struct Dim {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// A thread's built-in variables.
struct Thread {
  Dim thread;
  Dim block;
  Dim threads;
  Dim blocks;
};

extern Thread* self;  // the running thread

// A line of a kernel's source. As a default argument: the line of the call.
struct Where {
  const char* file;
  int line;

  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Ends the launch, with an error that says what the kernel did.
[[noreturn]] void fail(const std::string& what, Where where);

// ---- a launch -----------------------------------------------------------------------------------

enum class Order { kForward, kReverse, kRandom };  // of warps, lanes and blocks
// When cp.async, TMA and wgmma read and write.
enum class Copies { kAtOnce, kLate, kRandom };

struct Settings {
  Order order = Order::kForward;
  Copies copies = Copies::kAtOnce;
  uint64_t seed = 1;
};

struct Launch {
  void (*kernel)(const void* args);
  const void* args;
  Dim blocks;
  Dim threads;
  size_t shared_bytes;
  size_t most_shared_bytes;  // including static shared memory
  unsigned cluster;
};

// Runs a launch. Returns an empty string, or what went wrong.
std::string run(const Launch& launch, const Settings& settings);

// ---- what kernels call --------------------------------------------------------------------------

// The block's own instance of a __shared__ variable, which is identified by `key`.
void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();  // aligned to 1024

template <class T>
T& of_block(T& key) {
  return *static_cast<T*>(static_shared(&key, sizeof(T), alignof(T)));
}

// From a pointer to a 32-bit shared-memory address, and back. rank: of the block in its cluster.
uint32_t address_of(const void* pointer, Where where);
void* at_address(uint32_t address, size_t bytes, Where where);
void* in_block_of_cluster(uint32_t address, unsigned rank, size_t bytes, Where where);

// Called by all lanes of `mask` with their `data`; the last one executes for all.
using Execute = void (*)(void* const (&data)[32], uint32_t mask);
void collect(const char* what, uint32_t mask, void* data, Execute execute, Where where);

// ldmatrix of four matrices, if `reads`, which must be the same in all lanes. `row`: the address of
// the lane's row.
void load_matrices(bool reads, bool transposed, uint32_t (&word)[4], uint32_t row, Where where);

// mma of 16 rows and 8 columns: d = a b + c. steps: registers of b along k.
enum class Element { kHalf, kBfloat16, kTf32 };
void multiply(Element element, int steps, float (&d)[4], const uint32_t* a, const uint32_t* b,
              const float (&c)[4], Where where);

// wgmma by a warpgroup: d [64, columns] = a b + (accumulate ? d : 0). d: the thread's registers. a:
// registers, or null if a_tile describes it. transposed: rows of b are contiguous; transposed_a:
// columns of a are.
struct WarpgroupProduct {
  Element element;
  int columns;
  bool transposed_a;
  bool transposed;
  bool accumulate;
  uint64_t a_tile;
  uint64_t b_tile;
  const uint32_t* a;
  float* d;
};
void issue_product(const WarpgroupProduct& product, Where where);
void fence_products(Where where);
void commit_products(Where where);
void wait_for_products(int pending_groups, Where where);

// setmaxnreg, which has no effect but must be granted.
void change_registers(int registers, Where where);

void sync_block(Where where);
void sync_some(int barrier, int threads, bool waits, Where where);

unsigned cluster_rank();
unsigned cluster_size();
void arrive_in_cluster(Where where);
void wait_for_cluster(Where where);

void init_mbarrier(uint32_t barrier, uint32_t arrivals, Where where);
void arrive_at_mbarrier(uint32_t barrier, Where where);
void arrive_at_mbarrier_of(uint32_t barrier, unsigned rank, Where where);
void wait_for_mbarrier(uint32_t barrier, uint32_t parity, Where where);
bool is_mbarrier_complete(uint32_t barrier, uint32_t parity, Where where);

// cp.async of `bytes`, the first `reads` of which are copied; the rest are zeros.
void copy_async(uint32_t to, const void* from, uint32_t bytes, uint32_t reads, Where where);
void commit_copies();
void wait_for_copies(int pending_groups);
void wait_for_all_copies();
void arrive_on_copies(uint32_t barrier, Where where);

// TMA (tensor_copies.cpp). map: from driver.h's cuTensorMapEncodeTiled. at: coordinates, innermost
// first, of `rank` dimensions. blocks: of the cluster, one bit each.
void expect_bytes(uint32_t barrier, uint32_t bytes, Where where);
void load_tensor(uint32_t to, const void* map, uint32_t barrier, uint32_t blocks,
                 const int (&at)[4], int rank, Where where);
void store_tensor(const void* map, uint32_t from, const int (&at)[4], int rank, Where where);
void commit_stores();
void wait_for_stores(int pending_groups);

int64_t clock();

}  // namespace emulator
