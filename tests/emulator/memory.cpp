#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace emulator {
namespace {

constexpr size_t kAlignment = 16;

struct Allocation {
  unsigned char* mapped;
  size_t mapped_bytes;
  unsigned char* usable;  // between the forbidden pages
  size_t usable_bytes;
  unsigned char* data;
  size_t bytes;
};

std::vector<Allocation>& allocations() {
  static std::vector<Allocation> all;
  return all;
}

}  // namespace

void* allocate(size_t bytes, size_t misalignment, Guard guard) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = (bytes + 2 * kAlignment + page - 1) / page * page;
  void* mapped = mmap(nullptr, usable + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  Allocation made{};
  made.mapped = static_cast<unsigned char*>(mapped);
  made.mapped_bytes = usable + 2 * page;
  made.usable = made.mapped + page;
  made.usable_bytes = usable;
  made.bytes = bytes;
  mprotect(made.usable, usable, PROT_READ | PROT_WRITE);
  std::memset(made.usable, kNobodys, usable);
  made.data = made.usable + misalignment;
  if (guard == Guard::kBehind) {
    const size_t last = usable - bytes;
    made.data = made.usable + (last - misalignment) / kAlignment * kAlignment + misalignment;
  }
  allocations().push_back(made);
  return made.data;
}

std::string release_all() {
  std::string found;
  for (const Allocation& one : allocations()) {
    for (size_t i = 0; i < one.usable_bytes; ++i) {
      const unsigned char* at = one.usable + i;
      const bool is_data = at >= one.data && at < one.data + one.bytes;
      if (found.empty() && !is_data && *at != kNobodys) found = "written " + describe(at);
    }
    munmap(one.mapped, one.mapped_bytes);
  }
  allocations().clear();
  return found;
}

std::string describe(const void* address) {
  const auto* at = static_cast<const unsigned char*>(address);
  for (const Allocation& one : allocations()) {
    if (at < one.mapped || at >= one.mapped + one.mapped_bytes) continue;
    const std::string of = " an allocation of " + std::to_string(one.bytes) + " bytes";
    if (at < one.data) return std::to_string(one.data - at) + " bytes ahead of" + of;
    if (at < one.data + one.bytes) return std::to_string(at - one.data) + " bytes inside" + of;
    return std::to_string(at - one.data - one.bytes) + " bytes behind" + of;
  }
  char text[32];
  snprintf(text, sizeof text, "%p", address);
  return std::string(text) + ", which no allocation is near";
}

}  // namespace emulator
