// wgmma and setmaxnreg (PTX ISA, 9.7.15 and 9.7.19.5).
//
// The warps of a warpgroup must reach the same instructions in the same order, but do not wait for
// each other: `.sync` is per warp. Each multiplies its 16 rows, at once or as late as its wait
// allows.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fibers.h"
#include "tensor_core.h"

namespace emulator {
namespace {

constexpr int kWarps = 4;

void meet_warpgroup(const WarpgroupInstruction& here) {
  Warp& warp = *machine.current->warp;
  if (machine.launch.threads.x % (kWarps * kLanes) != 0) {
    fail(std::string(here.what) + " by a warpgroup without four warps", here.where);
  }
  auto& instructions = machine.current->block->warpgroups[warp.number / kWarps];
  const size_t nth = warp.instructions++;
  if (nth == instructions.size()) {
    instructions.push_back(here);
    return;
  }
  const WarpgroupInstruction& others = instructions[nth];
  if (std::strcmp(here.what, others.what) != 0 || !same(here.where, others.where)) {
    fail("the warpgroup diverges: this warp comes to " + std::string(here.what) +
             ", another one to " + others.what + ", " + text_of(others.where),
         here.where);
  }
  if (!std::equal(here.operand, std::end(here.operand), others.operand)) {
    fail("operands of " + std::string(here.what) + " differ in the warpgroup", here.where);
  }
}

// ---- operands in shared memory (9.7.15.5) -------------------------------------------------------

// A matrix descriptor, decoded; in bytes.
struct Descriptor {
  static constexpr uint64_t kSwizzle128 = 1;
  uint32_t begin;
  uint32_t leading;
  uint32_t stride;
  bool is_swizzled;

  static Descriptor of(uint64_t bits, Where where) {
    const auto field = [&](int first) {
      return static_cast<uint32_t>(bits >> first & 0x3FFF) * 16;
    };
    const uint64_t swizzle = bits >> 62;
    if (swizzle > kSwizzle128) fail("a swizzle that is not emulated", where);
    if ((bits >> 49 & 7) != 0) fail("a descriptor's base offset is not emulated", where);
    return {field(0), field(16), field(32), swizzle == kSwizzle128};
  }

  // 16 bytes of a row of a K-major operand.
  const uint32_t* of_row(int row, int vector, Where where) const {
    if (!is_swizzled)
      return words(begin + row / 8 * stride + row % 8 * 16 + vector * leading, where);
    const uint32_t at = begin + row / 8 * stride + row % 8 * 128 + vector * 16;
    return words(at ^ (at >> 3 & 0x70), where);
  }
  // 16 bytes, 8 columns, of one k of a transposed operand. With the swizzle, the leading offset is
  // from 64 columns to the next 64, else from 8 k to the next 8.
  const uint32_t* of_columns(int k, int vector, Where where) const {
    if (is_swizzled) {
      const uint32_t at =
          begin + vector / 8 * leading + k / 8 * stride + k % 8 * 128 + vector % 8 * 16;
      return words(at ^ (at >> 3 & 0x70), where);
    }
    return words(begin + vector * stride + k / 8 * leading + k % 8 * 16, where);
  }

 private:
  static const uint32_t* words(uint32_t address, Where where) {
    return static_cast<const uint32_t*>(at_address(address, 16, where));
  }
};

// ---- products -----------------------------------------------------------------------------------

template <Element kElement, int kK>
void read_rows(const IssuedProduct& issued, double (&a)[16][kK]) {
  constexpr int kElements = kElementsOfWord<kElement>;
  constexpr int kOfVector = 4 * kElements;
  const Descriptor tile = Descriptor::of(issued.product.a_tile, issued.where);
  const int first_row = machine.current->warp->number % kWarps * 16;
  if (issued.product.transposed_a) {
    if (kElement == Element::kTf32) fail("TF32 cannot be transposed", issued.where);
    for (int k = 0; k < kK; ++k) {
      for (int row = 0; row < 16; row += kOfVector) {
        const uint32_t* word = tile.of_columns(k, (first_row + row) / kOfVector, issued.where);
        for (int e = 0; e < kOfVector; ++e) {
          a[row + e][k] = element_of<kElement>(word[e / kElements], e % kElements);
        }
      }
    }
    return;
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kK; k += kOfVector) {
      const uint32_t* word = tile.of_row(first_row + row, k / kOfVector, issued.where);
      for (int e = 0; e < kOfVector; ++e) {
        a[row][k + e] = element_of<kElement>(word[e / kElements], e % kElements);
      }
    }
  }
}

template <Element kElement, int kK, int kColumns>
void read_columns(const IssuedProduct& issued, double (&b)[kK][kColumns]) {
  constexpr int kElements = kElementsOfWord<kElement>;
  constexpr int kOfVector = 4 * kElements;
  const Descriptor tile = Descriptor::of(issued.product.b_tile, issued.where);
  if (issued.product.transposed) {
    if (kElement == Element::kTf32) fail("TF32 cannot be transposed", issued.where);
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kColumns; n += kOfVector) {
        const uint32_t* word = tile.of_columns(k, n / kOfVector, issued.where);
        for (int e = 0; e < kOfVector; ++e) {
          b[k][n + e] = element_of<kElement>(word[e / kElements], e % kElements);
        }
      }
    }
    return;
  }
  for (int n = 0; n < kColumns; ++n) {
    for (int k = 0; k < kK; k += kOfVector) {
      const uint32_t* word = tile.of_row(n, k / kOfVector, issued.where);
      for (int e = 0; e < kOfVector; ++e) {
        b[k + e][n] = element_of<kElement>(word[e / kElements], e % kElements);
      }
    }
  }
}

template <Element kElement, int kColumns>
void make(const IssuedProduct& issued) {
  constexpr int kK = 8 * kElementsOfWord<kElement>;
  constexpr int kRegisters = kColumns / 2;
  const WarpgroupProduct& product = issued.product;
  double a[16][kK];
  double b[kK][kColumns];
  double sum[16][kColumns];
  if (product.a != nullptr) {
    for (int lane = 0; lane < kLanes; ++lane) take_rows<kElement>(lane, issued.a[lane], a);
  } else {
    read_rows<kElement>(issued, a);
  }
  read_columns<kElement>(issued, b);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kRegisters; ++i) {
      const auto [row, column] = PlaceOfSum::of(lane, i);
      sum[row][column] = product.accumulate ? (*issued.sums)[lane * kRegisters + i] : 0;
    }
  }
  add_products(a, b, sum);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kRegisters; ++i) {
      const auto [row, column] = PlaceOfSum::of(lane, i);
      (*issued.sums)[lane * kRegisters + i] = truncated(sum[row][column]);
    }
  }
}

template <Element kElement>
void make(const IssuedProduct& issued) {
  switch (issued.product.columns) {
    case 16:
      return make<kElement, 16>(issued);
    case 24:
      return make<kElement, 24>(issued);
    case 64:
      return make<kElement, 64>(issued);
    case 72:
      return make<kElement, 72>(issued);
    case 128:
      return make<kElement, 128>(issued);
    case 192:
      return make<kElement, 192>(issued);
    case 240:
      return make<kElement, 240>(issued);
    case 256:
      return make<kElement, 256>(issued);
    default:
      fail("wgmma of so many columns is not emulated", issued.where);
  }
}

// Writes sums to their registers, which hold kNobodys since the product was issued.
void show_sums(const IssuedProduct& issued) {
  const int registers = issued.product.columns / 2;
  for (int lane = 0; lane < kLanes; ++lane) {
    auto* shown = reinterpret_cast<unsigned char*>(issued.d[lane]);
    const size_t bytes = registers * sizeof(float);
    if (std::any_of(shown, shown + bytes, [](unsigned char byte) { return byte != kNobodys; })) {
      fail("registers of a wgmma are written before it is waited for", issued.where);
    }
    std::memcpy(shown, issued.sums->data() + lane * registers, bytes);
  }
}

void make_first(Warp& warp, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    IssuedProduct& issued = warp.products[i];
    if (issued.is_made) continue;
    issued.is_made = true;
    if (issued.product.element == Element::kTf32) {
      make<Element::kTf32>(issued);
    } else if (issued.product.element == Element::kHalf) {
      make<Element::kHalf>(issued);
    } else {
      make<Element::kBfloat16>(issued);
    }
    const auto end = warp.products.end();
    const bool is_last = std::none_of(warp.products.begin(), end, [&](const IssuedProduct& other) {
      return !other.is_made && other.sums == issued.sums;
    });
    if (is_last) show_sums(issued);
  }
}

// Takes the sums out of registers that no earlier product in flight has, and fills these with
// kNobodys.
void hide_sums(IssuedProduct& issued) {
  const int registers = issued.product.columns / 2;
  issued.sums = std::make_shared<std::vector<float>>(kLanes * registers);
  for (int lane = 0; lane < kLanes; ++lane) {
    const size_t bytes = registers * sizeof(float);
    std::memcpy(issued.sums->data() + lane * registers, issued.d[lane], bytes);
    std::memset(issued.d[lane], kNobodys, bytes);
  }
}

struct Given {
  WarpgroupProduct product;
  Where where;
};

void issue_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  const auto of = [&](int lane) -> const Given& { return *static_cast<const Given*>(data[lane]); };
  const auto [product, where] = of(0);
  IssuedProduct issued{product, where, machine.current->warp->product_group};
  for (int lane = 0; lane < kLanes; ++lane) {
    const WarpgroupProduct& mine = of(lane).product;
    if (mine.a_tile != product.a_tile || mine.b_tile != product.b_tile ||
        mine.accumulate != product.accumulate) {
      fail("operands of wgmma differ in the warp", where);
    }
    issued.d[lane] = mine.d;
    issued.a[lane] = mine.a;
  }
  meet_warpgroup({"wgmma", where, {product.a_tile, product.b_tile, product.accumulate}});
  Warp& warp = *machine.current->warp;
  if (!warp.is_fenced) fail("wgmma without wgmma.fence since registers were used", where);
  for (const IssuedProduct& before : warp.products) {
    if (!before.is_made && before.d[0] == issued.d[0]) issued.sums = before.sums;
  }
  if (issued.sums == nullptr) hide_sums(issued);
  warp.products.push_back(std::move(issued));
  const bool is_late = machine.settings.copies == Copies::kLate ||
                       (machine.settings.copies == Copies::kRandom && machine.random() % 2 == 0);
  if (!is_late) make_first(warp, warp.products.size());
}

// ---- groups -------------------------------------------------------------------------------------

struct Instruction {
  const char* what;
  Where where;
  uint64_t operand;
};

void meet_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  const auto& mine = *static_cast<const Instruction*>(data[0]);
  meet_warpgroup({mine.what, mine.where, {mine.operand, 0, 0}});
}

void fence_for_warp(void* const (&data)[32], uint32_t mask) {
  meet_for_warp(data, mask);
  machine.current->warp->is_fenced = true;
}

void commit_for_warp(void* const (&data)[32], uint32_t mask) {
  meet_for_warp(data, mask);
  ++machine.current->warp->product_group;
}

void wait_for_warp(void* const (&data)[32], uint32_t mask) {
  meet_for_warp(data, mask);
  const auto& mine = *static_cast<const Instruction*>(data[0]);
  Warp& warp = *machine.current->warp;
  const auto first = warp.products.begin();
  const int end = warp.product_group - static_cast<int>(mine.operand);
  const auto last = std::find_if(first, warp.products.end(),
                                 [&](const IssuedProduct& one) { return one.group >= end; });
  warp.is_fenced = false;
  if (std::any_of(first, last, [](const IssuedProduct& one) { return !one.is_made; })) {
    machine.waiting_for_products.push_back(machine.current);
    wait("wgmma.wait_group", mine.where);
    make_first(warp, static_cast<size_t>(last - first));
  }
  warp.products.erase(first, last);
}

void come_to(const char* what, uint64_t operand, Execute execute, Where where) {
  Instruction mine{what, where, operand};
  collect(what, kWholeWarp, &mine, execute, where);
}

}  // namespace

void issue_product(const WarpgroupProduct& product, Where where) {
  Given mine{product, where};
  collect("wgmma", kWholeWarp, &mine, issue_for_warp, where);
}

void fence_products(Where where) { come_to("wgmma.fence", 0, fence_for_warp, where); }

void commit_products(Where where) { come_to("wgmma.commit_group", 0, commit_for_warp, where); }

void wait_for_products(int pending_groups, Where where) {
  come_to("wgmma.wait_group", static_cast<uint64_t>(pending_groups), wait_for_warp, where);
}

void change_registers(int registers, Where where) {
  come_to("setmaxnreg", static_cast<uint64_t>(registers), meet_for_warp, where);
  // A block has what it is launched with, at most an equal share of 64 K for each thread.
  constexpr int kAll = 64 * 1024;
  const int threads = static_cast<int>(machine.launch.threads.x);
  const int groups = threads / (kWarps * kLanes);
  Fiber& me = *machine.current;
  auto& asked = me.block->registers;
  asked[me.warp->number / kWarps] = registers;
  if (static_cast<int>(asked.size()) < groups) return;
  int sum = 0;
  for (const auto& [group, wanted] : asked) sum += wanted;
  const int held = kAll / threads / 8 * 8 * groups;
  if (sum > held) {
    fail("setmaxnreg waits forever: warpgroups ask for " + std::to_string(sum) +
             " registers, and the block is launched with " + std::to_string(held),
         where);
  }
}

// ---- at the end ---------------------------------------------------------------------------------

void check_end_of_thread(const Fiber& fiber) {
  const auto& products = fiber.warp->products;
  if (!products.empty()) fail("ends, and has not waited for this wgmma", products[0].where);
}

std::string unfinished_warpgroup() {
  for (const Warp& warp : machine.warps) {
    const auto& of_block = warp.lanes[0]->block->warpgroups;
    const auto found = of_block.find(warp.number / kWarps);
    if (found == of_block.end() || warp.instructions == found->second.size()) continue;
    const WarpgroupInstruction& missed = found->second[warp.instructions];
    return "warp " + std::to_string(warp.number) + " has ended, and another one of its warpgroup " +
           "comes to " + missed.what + ", " + text_of(missed.where);
  }
  return "";
}

}  // namespace emulator
