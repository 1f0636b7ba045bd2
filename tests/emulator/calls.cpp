// The functions that kernels call.
#include "fibers.h"

namespace emulator {

// ---- shared memory ------------------------------------------------------------------------------

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  Arena& arena = machine.current->block->arena;
  const auto found = arena.variables.find(key);
  if (found != arena.variables.end()) return arena.base + found->second.offset;
  const size_t offset = (arena.used + alignment - 1) / alignment * alignment;
  arena.used = offset + bytes;
  if (arena.used + arena.dynamic_bytes > machine.launch.most_shared_bytes) {
    fail("more shared memory than a block of this GPU has", {"__shared__", 0});
  }
  arena.variables[key] = {offset, bytes};
  std::memset(arena.base + offset, kNobodys, bytes);
  return arena.base + offset;
}

void* dynamic_shared() {
  const Arena& arena = machine.current->block->arena;
  return arena.base + arena.dynamic;
}

uint32_t address_of(const void* pointer, Where where) {
  const Arena& arena = machine.current->block->arena;
  const auto offset = static_cast<const unsigned char*>(pointer) - arena.base;
  if (offset < 0 || offset > static_cast<ptrdiff_t>(kArenaBytes)) {
    fail("a pointer that does not point to shared memory", where);
  }
  return kFirstAddress + static_cast<uint32_t>(offset);
}

namespace {

void* in_block(const Block& block, uint32_t address, size_t bytes, Where where) {
  const size_t offset = size_t{address} - kFirstAddress;
  if (address < kFirstAddress || !block.arena.has(offset, bytes)) {
    fail("shared memory is touched where the block has none", where);
  }
  if (offset % bytes != 0) {
    fail("an access of " + std::to_string(bytes) + " bytes is not aligned in shared memory", where);
  }
  return block.arena.base + offset;
}

}  // namespace

void* at_address(uint32_t address, size_t bytes, Where where) {
  return in_block(*machine.current->block, address, bytes, where);
}

void* in_block_of_cluster(uint32_t address, unsigned rank, size_t bytes, Where where) {
  if (rank >= machine.launch.cluster) fail("the cluster has no such block", where);
  return in_block(*machine.blocks[rank], address, bytes, where);
}

// ---- warps --------------------------------------------------------------------------------------

void collect(const char* what, uint32_t mask, void* data, Execute execute, Where where) {
  Fiber& me = *machine.current;
  Warp& warp = *me.warp;
  const uint32_t bit = 1u << me.lane;
  if ((mask & bit) == 0) fail(std::string(what) + " without the lane itself", where);
  auto found = warp.gatherings.begin();
  while (found != warp.gatherings.end() && (found->mask & mask) == 0) ++found;
  if (found == warp.gatherings.end()) {
    found = warp.gatherings.insert(found, Gathering{what, where, mask});
  }
  if (found->what != what || found->mask != mask || !same(found->where, where)) {
    fail("the warp diverges: this lane comes to " + std::string(what) + ", another one to " +
             found->what + ", " + text_of(found->where),
         where);
  }
  found->arrived |= bit;
  found->data[me.lane] = data;
  found->lanes[me.lane] = &me;
  if (found->arrived != mask) {
    wait(what, where);
    return;
  }
  const Gathering gathering = *found;
  warp.gatherings.erase(found);
  execute(gathering.data, mask);
  for (Fiber* lane : gathering.lanes) {
    if (lane != nullptr && lane != &me) make_ready(*lane);
  }
}

// ---- barriers -----------------------------------------------------------------------------------

void sync_block(Where where) {
  Fiber& me = *machine.current;
  Barrier& barrier = me.block->all;
  if (++barrier.arrived == me.block->alive) {
    release(barrier);
    return;
  }
  barrier.waiting.push_back(&me);
  wait("a barrier of the block", where);
}

void sync_some(int id, int threads, bool waits, Where where) {
  if (id <= 0 || id >= kNamedBarriers) fail("no such barrier", where);
  Fiber& me = *machine.current;
  Barrier& barrier = me.block->some[id];
  if (++barrier.arrived == threads) {
    release(barrier);
    return;
  }
  if (barrier.arrived > threads) fail("more threads than a barrier is of", where);
  if (!waits) return;
  barrier.waiting.push_back(&me);
  wait("a named barrier", where);
}

unsigned cluster_rank() { return machine.current->block->rank; }
unsigned cluster_size() { return machine.launch.cluster; }

void arrive_in_cluster(Where where) {
  Fiber& me = *machine.current;
  if (me.arrived_in_cluster) fail("arrives twice in the cluster, and has not waited", where);
  me.arrived_in_cluster = true;
  me.cluster_phase = machine.cluster_phase;
  if (++machine.cluster_arrived < machine.fibers.size()) return;
  machine.cluster_arrived = 0;
  ++machine.cluster_phase;
  for (Fiber* fiber : machine.waiting_for_cluster) make_ready(*fiber);
  machine.waiting_for_cluster.clear();
}

void wait_for_cluster(Where where) {
  Fiber& me = *machine.current;
  if (!me.arrived_in_cluster) fail("waits for the cluster, and has not arrived", where);
  me.arrived_in_cluster = false;
  if (me.cluster_phase != machine.cluster_phase) return;
  machine.waiting_for_cluster.push_back(&me);
  wait("a barrier of the cluster", where);
}

// ---- mbarriers ----------------------------------------------------------------------------------

namespace {

Mbarrier read_mbarrier(const uint64_t* word, Where where) {
  const Mbarrier found = Mbarrier::of(*word);
  if (found.magic != Mbarrier::kMagic) fail("there is no initialised mbarrier here", where);
  return found;
}

uint64_t* mbarrier_at(uint32_t address, Where where) {
  return static_cast<uint64_t*>(at_address(address, sizeof(uint64_t), where));
}

}  // namespace

void init_mbarrier(uint32_t barrier, uint32_t arrivals, Where where) {
  if (arrivals == 0 || arrivals > 0xFFFFF) fail("no such number of arrivals", where);
  uint64_t* word = mbarrier_at(barrier, where);
  *word = Mbarrier{Mbarrier::kMagic, 0, arrivals, arrivals}.word();
  machine.bytes_due.erase(word);
}

void arrive_at_mbarrier(uint32_t barrier, Where where) {
  uint64_t* word = mbarrier_at(barrier, where);
  read_mbarrier(word, where);
  arrive(word);
}

void arrive_at_mbarrier_of(uint32_t barrier, unsigned rank, Where where) {
  auto* word = static_cast<uint64_t*>(in_block_of_cluster(barrier, rank, sizeof(uint64_t), where));
  read_mbarrier(word, where);
  if (!arrive(word)) fail("more arrivals at an mbarrier than it was initialised with", where);
}

bool is_mbarrier_complete(uint32_t barrier, uint32_t parity, Where where) {
  if (parity > 1) fail("a parity is 0 or 1", where);
  // The phase of this parity is complete if the current phase has the other parity.
  return read_mbarrier(mbarrier_at(barrier, where), where).phase != parity;
}

void wait_for_mbarrier(uint32_t barrier, uint32_t parity, Where where) {
  if (is_mbarrier_complete(barrier, parity, where)) return;
  machine.current->mbarrier = mbarrier_at(barrier, where);
  machine.current->parity = parity;
  wait("an mbarrier", where);
}

// ---- copies -------------------------------------------------------------------------------------

void copy_async(uint32_t to, const void* from, uint32_t bytes, uint32_t reads, Where where) {
  if (reads > bytes) fail("a copy of more bytes than there is room for", where);
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    fail("a copy of " + std::to_string(bytes) + " bytes is not aligned in global memory", where);
  }
  Fiber& me = *machine.current;
  const Copy copy{at_address(to, bytes, where), from, bytes, reads, me.group, nullptr};
  const bool is_late = machine.settings.copies == Copies::kLate ||
                       (machine.settings.copies == Copies::kRandom && machine.random() % 2 == 0);
  if (is_late) {
    me.copies.push_back(copy);
  } else {
    land(copy);
  }
}

void arrive_on_copies(uint32_t barrier, Where where) {
  uint64_t* word = mbarrier_at(barrier, where);
  read_mbarrier(word, where);
  Fiber& me = *machine.current;
  me.copies.push_back({nullptr, nullptr, 0, 0, me.group, word});
  if (machine.settings.copies == Copies::kAtOnce) land_first(me, me.copies.size());
}

void commit_copies() { ++machine.current->group; }

void wait_for_copies(int pending_groups) {
  Fiber& me = *machine.current;
  size_t count = 0;
  while (count < me.copies.size() && me.copies[count].group < me.group - pending_groups) ++count;
  land_first(me, count);
}

void wait_for_all_copies() {
  Fiber& me = *machine.current;
  land_first(me, me.copies.size());
}

int64_t clock() { return machine.ticks; }

}  // namespace emulator

// ---- what -fsanitize finds ----------------------------------------------------------------------

namespace {

struct Found {
  const char* file;
  uint32_t line;
  uint32_t column;
};

}  // namespace

#define FX_FUSER_FINDS(name, what)                                                      \
  extern "C" [[noreturn]] void __ubsan_handle_##name##_abort(const Found* found, ...) { \
    emulator::fail(what, {found->file, static_cast<int>(found->line)});                 \
  }
FX_FUSER_FINDS(type_mismatch_v1, "an access that is not aligned, or through a null pointer")
FX_FUSER_FINDS(out_of_bounds, "an index beyond the array")
FX_FUSER_FINDS(shift_out_of_bounds, "a shift by more bits than there are")
FX_FUSER_FINDS(add_overflow, "a signed sum overflows")
FX_FUSER_FINDS(sub_overflow, "a signed difference overflows")
FX_FUSER_FINDS(mul_overflow, "a signed product overflows")
FX_FUSER_FINDS(negate_overflow, "a signed negation overflows")
FX_FUSER_FINDS(divrem_overflow, "a division by zero, or one that overflows")
#undef FX_FUSER_FINDS
