#include "machine.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "memory.h"

namespace emulator {

Thread* self = nullptr;

namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 512 << 10;
constexpr size_t kArenaBytes = 512 << 10;
constexpr size_t kArenaAlignment = 64 << 10;
constexpr uint32_t kFirstAddress = 1024;  // 0 is no address
constexpr int kNamedBarriers = 16;

// ---- a block's shared memory --------------------------------------------------------------------

struct Variable {
  size_t offset;
  size_t bytes;
};

// Variables from the beginning on; the dynamic part ends at a forbidden page.
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

  // Was something written behind the dynamic part?
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
  uint64_t* arrives;  // null, or in place of a copy: the mbarrier that is told of those before
};

struct Warp;
struct Block;

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
  unsigned cluster_phase = 0;  // that it has arrived in
  int group = 0;               // of copies
  std::vector<Copy> copies;    // that have not landed, in order

  bool is_alive = false;  // is on its stack, ready for a kernel
  unsigned char* stack = nullptr;
  ucontext_t first;
  jmp_buf context;
};

// A warp's lanes on their way to one instruction.
struct Gathering {
  const char* what;
  Where where;
  uint32_t mask;
  uint32_t arrived = 0;
  void* data[kLanes] = {};
  Fiber* lanes[kLanes] = {};
};

struct Warp {
  int number;  // in its block
  std::vector<Fiber*> lanes;
  int ready = 0;
  std::vector<Gathering> gatherings;
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
};

std::string text_of(Where where) {
  const char* slash = std::strrchr(where.file, '/');
  return std::string(slash != nullptr ? slash + 1 : where.file) + ":" + std::to_string(where.line);
}

struct Machine {
  Launch launch{};
  Settings settings;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Fiber>> pool;  // with their stacks, for all launches
  std::vector<std::unique_ptr<Block>> block_pool;
  std::vector<Fiber*> fibers;  // of the cluster
  std::vector<Block*> blocks;
  std::vector<Warp> warps;
  unsigned cluster_arrived = 0;
  unsigned cluster_phase = 0;
  std::vector<Fiber*> waiting_for_cluster;
  int alive = 0;
  int64_t ticks = 0;
  Fiber* current = nullptr;
  std::string error;
  jmp_buf scheduler;
  ucontext_t making;
};

Machine machine;

// ---- from fiber to fiber ------------------------------------------------------------------------

void run_fiber() {
  Fiber* me = machine.current;
  for (;;) {
    if (_setjmp(me->context) == 0) {
      if (!me->is_alive) {
        me->is_alive = true;
        setcontext(&machine.making);
      }
      _longjmp(machine.scheduler, 1);
    }
    machine.launch.kernel(machine.launch.args);
    me->state = State::kDone;
  }
}

void make_alive(Fiber& fiber) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (fiber.stack == nullptr) {
    void* mapped = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapped, page, PROT_NONE);
    fiber.stack = static_cast<unsigned char*>(mapped);
  }
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = fiber.stack + page;
  fiber.first.uc_stack.ss_size = kStackBytes - page;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, run_fiber, 0);
  machine.current = &fiber;
  swapcontext(&machine.making, &fiber.first);
}

// Until it waits, ends or fails.
__attribute__((noinline)) void resume(Fiber& fiber) {
  machine.current = &fiber;
  self = &fiber.thread;
  if (_setjmp(machine.scheduler) == 0) _longjmp(fiber.context, 1);
}

// Back to the scheduler; returns when this fiber is run again.
void leave() {
  if (_setjmp(machine.current->context) == 0) _longjmp(machine.scheduler, 1);
}

void make_ready(Fiber& fiber) {
  fiber.state = State::kReady;
  ++fiber.warp->ready;
}

void wait(const char* what, Where where) {
  Fiber& me = *machine.current;
  me.state = State::kWaits;
  me.waits_for = what;
  me.where = where;
  leave();
}

void release(Barrier& barrier) {
  barrier.arrived = 0;
  for (Fiber* fiber : barrier.waiting) make_ready(*fiber);
  barrier.waiting.clear();
}

std::string name_of(const Fiber& fiber) {
  return "thread " + std::to_string(fiber.thread.thread.x) + " of block " +
         std::to_string(fiber.thread.block.x);
}

// ---- mbarriers ----------------------------------------------------------------------------------

// In the word that the kernel keeps for it.
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

Mbarrier read_mbarrier(const uint64_t* word, Where where) {
  const Mbarrier found = Mbarrier::of(*word);
  if (found.magic != Mbarrier::kMagic) fail("there is no initialised mbarrier here", where);
  return found;
}

// What arrives may be a copy, when no thread runs: then the scheduler says what is wrong.
bool arrive(uint64_t* word) {
  Mbarrier found = Mbarrier::of(*word);
  if (found.magic != Mbarrier::kMagic || found.pending == 0) return false;
  if (--found.pending == 0) {
    found.phase ^= 1;
    found.pending = found.expected;
    *word = found.word();
    for (Fiber* fiber : machine.fibers) {
      if (fiber->state == State::kWaits && fiber->mbarrier == word &&
          fiber->parity != found.phase) {
        fiber->mbarrier = nullptr;
        make_ready(*fiber);
      }
    }
  }
  *word = found.word();
  return true;
}

// ---- copies -------------------------------------------------------------------------------------

void land(const Copy& copy) {
  if (copy.arrives != nullptr) {
    if (!arrive(copy.arrives)) machine.error = "copies arrive at an mbarrier that is none";
    return;
  }
  std::memcpy(copy.to, copy.from, copy.reads);
  std::memset(static_cast<char*>(copy.to) + copy.reads, 0, copy.bytes - copy.reads);
}

void land_first(Fiber& fiber, size_t count) {
  for (size_t i = 0; i < count; ++i) land(fiber.copies[i]);
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(count));
}

// Of a thread that does not run, as the hardware would at that moment.
__attribute__((noinline)) void land_beside(Fiber& fiber, size_t count) {
  machine.current = &fiber;
  if (_setjmp(machine.scheduler) == 0) land_first(fiber, count);
}

// Nothing can run: what some thread has copied arrives, as it would by itself.
bool land_one_arrival() {
  std::vector<Fiber*> with;
  for (Fiber* fiber : machine.fibers) {
    const auto& copies = fiber->copies;
    if (std::any_of(copies.begin(), copies.end(), [](auto& c) { return c.arrives != nullptr; })) {
      with.push_back(fiber);
    }
  }
  if (with.empty()) return false;
  size_t chosen = 0;
  if (machine.settings.order == Order::kReverse) chosen = with.size() - 1;
  if (machine.settings.order == Order::kRandom) chosen = machine.random() % with.size();
  Fiber& fiber = *with[chosen];
  size_t count = 1;
  while (fiber.copies[count - 1].arrives == nullptr) ++count;
  land_beside(fiber, count);
  return true;
}

// ---- the scheduler ------------------------------------------------------------------------------

Warp* next_warp() {
  std::vector<Warp*> ready;
  const bool forward = machine.settings.order == Order::kForward;
  for (size_t i = 0; i < machine.warps.size(); ++i) {
    Warp& warp = machine.warps[forward ? i : machine.warps.size() - 1 - i];
    if (warp.ready == 0) continue;
    // The first one that can run, as long as it can: so warps get as far apart as they may.
    if (machine.settings.order != Order::kRandom) return &warp;
    ready.push_back(&warp);
  }
  return ready.empty() ? nullptr : ready[machine.random() % ready.size()];
}

void run_lanes(Warp& warp) {
  const auto count = static_cast<int>(warp.lanes.size());
  int order[kLanes];
  for (int i = 0; i < count; ++i) {
    order[i] = machine.settings.order == Order::kReverse ? count - 1 - i : i;
  }
  if (machine.settings.order == Order::kRandom) {
    std::shuffle(order, order + count, machine.random);
  }
  for (int i = 0; i < count && machine.error.empty(); ++i) {
    Fiber& fiber = *warp.lanes[order[i]];
    if (fiber.state != State::kReady) continue;
    --warp.ready;
    ++machine.ticks;
    resume(fiber);
    if (fiber.state == State::kDone) {
      Block& block = *fiber.block;
      --block.alive;
      --machine.alive;
      // Who has ended is not waited for.
      if (block.all.arrived > 0 && block.all.arrived == block.alive) release(block.all);
    }
  }
}

std::string deadlock() {
  std::string text = "no thread can run:";
  for (const Warp& warp : machine.warps) {
    std::map<std::string, int> places;
    for (const Fiber* fiber : warp.lanes) {
      const bool is_done = fiber->state == State::kDone;
      ++places[is_done ? "ended"
                       : std::string("at ") + fiber->waits_for + ", " + text_of(fiber->where)];
    }
    text += "\n  block " + std::to_string(warp.lanes[0]->thread.block.x) + ", warp " +
            std::to_string(warp.number) + ":";
    const char* comma = " ";
    for (const auto& [place, lanes] : places) {
      text += comma + std::to_string(lanes) + " lanes " + place;
      comma = "; ";
    }
  }
  return text;
}

void schedule() {
  while (machine.alive > 0 && machine.error.empty()) {
    if (Warp* warp = next_warp()) {
      run_lanes(*warp);
    } else if (!land_one_arrival()) {
      machine.error = deadlock();
    }
  }
}

// ---- faults -------------------------------------------------------------------------------------

void on_signal(int signal, siginfo_t* info, void* /*context*/) {
  if (machine.current == nullptr) {
    ::signal(signal, SIG_DFL);
    return;
  }
  const char* name = signal == SIGSEGV || signal == SIGBUS ? "touches memory " : "is stopped at ";
  machine.error = name_of(*machine.current) + " " + name + describe(info->si_addr);
  _longjmp(machine.scheduler, 1);
}

class Signals {
 public:
  Signals() {
    stack_t alternate{};
    alternate.ss_sp = stack_.data();
    alternate.ss_size = stack_.size();
    sigaltstack(&alternate, &stack_before_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < std::size(kCaught); ++i) sigaction(kCaught[i], &action, &before_[i]);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  ~Signals() {
    for (size_t i = 0; i < std::size(kCaught); ++i) sigaction(kCaught[i], &before_[i], nullptr);
    if (stack_before_.ss_flags != SS_ONSTACK) sigaltstack(&stack_before_, nullptr);
  }

 private:
  static constexpr int kCaught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  std::vector<char> stack_ = std::vector<char>(64 << 10);
  stack_t stack_before_{};
  struct sigaction before_[std::size(kCaught)];
};

// ---- a launch -----------------------------------------------------------------------------------

template <class T>
void take(std::vector<T*>& taken, std::vector<std::unique_ptr<T>>& pool, size_t count) {
  while (pool.size() < count) pool.push_back(std::make_unique<T>());
  taken.clear();
  for (size_t i = 0; i < count; ++i) taken.push_back(pool[i].get());
}

void begin_cluster(unsigned first_block) {
  const Launch& launch = machine.launch;
  const unsigned threads = launch.threads.x;
  const unsigned warps = (threads + kLanes - 1) / kLanes;
  take(machine.blocks, machine.block_pool, launch.cluster);
  take(machine.fibers, machine.pool, size_t{launch.cluster} * threads);
  machine.warps.assign(size_t{launch.cluster} * warps, Warp{});
  machine.cluster_arrived = 0;
  machine.cluster_phase = 0;
  machine.waiting_for_cluster.clear();
  machine.alive = static_cast<int>(machine.fibers.size());
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    Block& block = *machine.blocks[rank];
    block.index.x = first_block + rank;
    block.rank = rank;
    block.alive = static_cast<int>(threads);
    block.all = {};
    for (Barrier& barrier : block.some) barrier = {};
    block.arena.begin(launch.shared_bytes);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = *machine.fibers[rank * threads + t];
      if (!fiber.is_alive) make_alive(fiber);
      Warp& warp = machine.warps[rank * warps + t / kLanes];
      warp.number = static_cast<int>(t) / kLanes;
      warp.lanes.push_back(&fiber);
      fiber.thread = {{t, 0, 0}, {block.index.x, 0, 0}, launch.threads, launch.blocks};
      fiber.warp = &warp;
      fiber.block = &block;
      fiber.lane = static_cast<int>(t) % kLanes;
      fiber.mbarrier = nullptr;
      fiber.arrived_in_cluster = false;
      fiber.group = 0;
      fiber.copies.clear();
      make_ready(fiber);
    }
  }
}

void end_cluster() {
  for (Fiber* fiber : machine.fibers) land_beside(*fiber, fiber->copies.size());
  for (const Block* block : machine.blocks) {
    if (block->arena.is_overrun()) machine.error = "written behind the dynamic shared memory";
  }
}

}  // namespace

std::string run(const Launch& launch, const Settings& settings) {
  machine.launch = launch;
  machine.settings = settings;
  machine.random.seed(settings.seed);
  machine.error.clear();
  const Signals signals;
  const unsigned clusters = launch.blocks.x / launch.cluster;
  std::vector<unsigned> order(clusters);
  for (unsigned i = 0; i < clusters; ++i) {
    order[i] = settings.order == Order::kReverse ? clusters - 1 - i : i;
  }
  if (settings.order == Order::kRandom) std::shuffle(order.begin(), order.end(), machine.random);
  for (const unsigned cluster : order) {
    begin_cluster(cluster * launch.cluster);
    schedule();
    if (machine.error.empty()) end_cluster();
    if (!machine.error.empty()) break;
  }
  machine.current = nullptr;
  for (Fiber* fiber : machine.fibers) {
    if (fiber->state != State::kDone) fiber->is_alive = false;
    fiber->state = State::kDone;
  }
  return machine.error;
}

void fail(const std::string& what, Where where) {
  machine.error = name_of(*machine.current) + ", " + text_of(where) + ": " + what;
  _longjmp(machine.scheduler, 1);
}

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
    fail("a pointer that is none to shared memory", where);
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
  if (found->what != what || found->mask != mask || found->where.line != where.line ||
      std::strcmp(found->where.file, where.file) != 0) {
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

uint64_t* mbarrier_at(uint32_t address, Where where) {
  return static_cast<uint64_t*>(at_address(address, sizeof(uint64_t), where));
}

}  // namespace

void init_mbarrier(uint32_t barrier, uint32_t arrivals, Where where) {
  if (arrivals == 0 || arrivals > 0xFFFFF) fail("no such number of arrivals", where);
  *mbarrier_at(barrier, where) = Mbarrier{Mbarrier::kMagic, 0, arrivals, arrivals}.word();
}

void arrive_at_mbarrier(uint32_t barrier, Where where) {
  uint64_t* word = mbarrier_at(barrier, where);
  read_mbarrier(word, where);
  arrive(word);
}

void wait_for_mbarrier(uint32_t barrier, uint32_t parity, Where where) {
  if (parity > 1) fail("a parity is 0 or 1", where);
  const uint64_t* word = mbarrier_at(barrier, where);
  // The phase of this parity is complete where the current one has the other.
  if (read_mbarrier(word, where).phase != parity) return;
  machine.current->mbarrier = word;
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
