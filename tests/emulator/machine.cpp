#include <signal.h>
#include <unistd.h>

#include "fibers.h"

namespace emulator {

Thread* self = nullptr;

// ---- switching fibers ---------------------------------------------------------------------------

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
    check_end_of_thread(*me);
    check_stores_at_end(*me);
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

// Runs a fiber until it waits, ends or fails.
__attribute__((noinline)) void resume(Fiber& fiber) {
  machine.current = &fiber;
  self = &fiber.thread;
  if (_setjmp(machine.scheduler) == 0) _longjmp(fiber.context, 1);
}

// Switches to the scheduler; returns when this fiber runs again.
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

// ---- arrivals -----------------------------------------------------------------------------------

// Ends the phase if all arrivals and all expected bytes are there.
void settle(uint64_t* word) {
  Mbarrier found = Mbarrier::of(*word);
  const auto due = machine.bytes_due.find(word);
  if (found.pending != 0 || (due != machine.bytes_due.end() && due->second != 0)) return;
  found.phase ^= 1;
  found.pending = found.expected;
  *word = found.word();
  for (Fiber* fiber : machine.fibers) {
    if (fiber->state == State::kWaits && fiber->mbarrier == word && fiber->parity != found.phase) {
      fiber->mbarrier = nullptr;
      make_ready(*fiber);
    }
  }
}

bool arrive(uint64_t* word) {
  Mbarrier found = Mbarrier::of(*word);
  if (found.magic != Mbarrier::kMagic || found.pending == 0) return false;
  --found.pending;
  *word = found.word();
  settle(word);
  return true;
}

bool arrive_bytes(uint64_t* word, int64_t bytes) {
  if (Mbarrier::of(*word).magic != Mbarrier::kMagic) return false;
  machine.bytes_due[word] -= bytes;
  settle(word);
  return true;
}

// ---- copies -------------------------------------------------------------------------------------

void land(const Copy& copy) {
  if (copy.arrives != nullptr) {
    if (!arrive(copy.arrives)) machine.error = "copies arrive at something that is not an mbarrier";
    return;
  }
  std::memcpy(copy.to, copy.from, copy.reads);
  std::memset(static_cast<char*>(copy.to) + copy.reads, 0, copy.bytes - copy.reads);
}

void land_first(Fiber& fiber, size_t count) {
  for (size_t i = 0; i < count; ++i) land(fiber.copies[i]);
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(count));
}

// Lands copies of a thread that is not running, as the hardware may at any time.
__attribute__((noinline)) void land_beside(Fiber& fiber, size_t count) {
  machine.current = &fiber;
  if (_setjmp(machine.scheduler) == 0) land_first(fiber, count);
}

__attribute__((noinline)) void land_box_beside(const Box& box) {
  machine.current = box.of;
  if (_setjmp(machine.scheduler) == 0) land_box(box);
}

// If no thread can run: lands one thread's copies up to its next arrival at an mbarrier.
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

// If no thread can run: makes the products that one warp waits for.
bool make_one_product() {
  auto& waiting = machine.waiting_for_products;
  if (waiting.empty()) return false;
  size_t chosen = 0;
  if (machine.settings.order == Order::kReverse) chosen = waiting.size() - 1;
  if (machine.settings.order == Order::kRandom) chosen = machine.random() % waiting.size();
  make_ready(*waiting[chosen]);
  waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(chosen));
  return true;
}

// If no thread can run: lands one of TMA's boxes.
bool land_one_box() {
  auto& boxes = machine.boxes;
  if (boxes.empty()) return false;
  size_t chosen = 0;
  if (machine.settings.order == Order::kReverse) chosen = boxes.size() - 1;
  if (machine.settings.order == Order::kRandom) chosen = machine.random() % boxes.size();
  const Box box = boxes[chosen];
  boxes.erase(boxes.begin() + static_cast<ptrdiff_t>(chosen));
  land_box_beside(box);
  return true;
}

// If no thread can run: completes one asynchronous operation. Which kind comes first varies.
bool proceed() {
  bool products_first = machine.settings.order == Order::kReverse;
  if (machine.settings.order == Order::kRandom) products_first = machine.random() % 2 == 0;
  if (products_first) return make_one_product() || land_one_box() || land_one_arrival();
  return land_one_arrival() || land_one_box() || make_one_product();
}

// ---- the scheduler ------------------------------------------------------------------------------

Warp* next_warp() {
  std::vector<Warp*> ready;
  const bool forward = machine.settings.order == Order::kForward;
  for (size_t i = 0; i < machine.warps.size(); ++i) {
    Warp& warp = machine.warps[forward ? i : machine.warps.size() - 1 - i];
    if (warp.ready == 0) continue;
    // The first warp that can run goes on for as long as it can, so that warps get far apart.
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
      // A barrier does not wait for threads that have ended.
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
    } else if (!proceed()) {
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
  machine.waiting_for_products.clear();
  machine.bytes_due.clear();
  machine.boxes.clear();
  machine.alive = static_cast<int>(machine.fibers.size());
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    Block& block = *machine.blocks[rank];
    block.index.x = first_block + rank;
    block.rank = rank;
    block.alive = static_cast<int>(threads);
    block.all = {};
    for (Barrier& barrier : block.some) barrier = {};
    block.warpgroups.clear();
    block.registers.clear();
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
      fiber.store_group = 0;
      fiber.stores.clear();
      make_ready(fiber);
    }
  }
}

void end_cluster() {
  machine.error = unfinished_warpgroup();
  if (!machine.boxes.empty()) machine.error = "ends before a box of TMA has arrived";
  for (Fiber* fiber : machine.fibers) land_beside(*fiber, fiber->copies.size());
  for (const Block* block : machine.blocks) {
    if (block->arena.is_overrun()) machine.error = "written behind the dynamic shared memory";
  }
}

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

}  // namespace emulator
